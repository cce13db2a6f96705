"""Named, numbered settings of steering, kept as files that several processes may share.

`FOLDER/NAME/VERSION.json` holds one version. Files are the truth: each use looks at the folder, and what a file holds
is kept in memory for as long as the file is the same one. A version never changes and its number is never given again:
one that is deleted leaves `VERSION.gone`. Writers take turns by a lock of the folder; a version appears whole or not
at all, since a finished file is linked to its name. Of steering this knows only that it is JSON.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import SERVER_ERROR, ApiError

logger = logging.getLogger("ray.serve")

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The first character keeps out `.` and `..`, hidden files and what looks like an option."""
MAX_NAMES = 1000
"""Deleted ones count, since their numbers are remembered."""
MAX_VERSIONS = 1000
MAX_FILE_BYTES = 2**18
MAX_VERSION = 10**9
_LOCK_TIMEOUT_S = 10.0
_LOCK_PAUSE_S = 0.005
_FORMAT = 1
_NAME = re.compile(NAME_PATTERN)
_FILE = re.compile(r"([1-9][0-9]{0,9})\.(json|gone)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One version of one name."""

    name: str
    version: int
    description: str
    steering: Mapping[str, Any]
    """As JSON, with every concept resolved."""
    checkpoint: str
    """Fingerprint of what the concepts are ids of."""
    created: int
    """Seconds since 1970."""

    @property
    def id(self) -> str:
        """`name@version`, by which requests name it."""
        return f"{self.name}@{self.version}"

    @property
    def fingerprint(self) -> str:
        """The same for the same content, whatever its name and number."""
        content = [self.description, self.steering, self.checkpoint]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def split_id(preset_id: str, *, param: str) -> tuple[str, int | None]:
    """`name` or `name@version` -> both; None means the latest. Raises ApiError preset_not_found for anything else."""
    name, at, version = preset_id.partition("@")
    if _NAME.fullmatch(name) and not at:
        return name, None
    if _NAME.fullmatch(name) and re.fullmatch("[1-9][0-9]{0,9}", version) and int(version) <= MAX_VERSION:
        return name, int(version)
    message = f"preset is {preset_id[:80]!r}; it must be a name of {NAME_PATTERN}, with @ and a version if need be"
    raise ApiError(404, message, code="preset_not_found", param=param)


class PresetStore:
    """The presets in one folder, which appears with the first of them. Methods block: call them off the event loop."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._read: dict[Path, tuple[tuple[int, int, int], Preset | None]] = {}
        """File -> (its identity, what it holds); None for a corrupt one, which is logged once."""

    def names(self) -> list[str]:
        """Names that have a version, in order. Raises ApiError where the folder cannot be read, as all that read do."""
        with _storage_errors("read"):
            return [name for name in self._folders() if self._numbers(name)]

    def versions(self, name: str) -> list[Preset]:
        """All versions of a name that can be read, the first one first."""
        if not _NAME.fullmatch(name):
            return []
        with _storage_errors("read"):
            found = [self._load(name, number) for number in self._numbers(name)]
        return [preset for preset in found if preset is not None]

    def get(self, preset_id: str, *, param: str = "preset") -> Preset:
        """The version that `name@version` names, or the latest of `name`. Raises ApiError preset_not_found."""
        name, version = split_id(preset_id, param=param)
        with _storage_errors("read"):
            numbers = self._numbers(name)
            for number in reversed(numbers) if version is None else [n for n in numbers if n == version]:
                preset = self._load(name, number)
                if preset is not None:
                    return preset
        if version in numbers:
            message = f"preset {preset_id} cannot be read; the server's log says why"
        elif numbers:
            message = f"preset {name} has no version {version}; it has {_listed(numbers)}"
        else:
            message = f"no preset is called {name!r}; see GET /v1/steering/presets"
        raise ApiError(404, message, code="preset_not_found", param=param)

    def add(self, name: str, description: str, steering: Mapping[str, Any], checkpoint: str) -> Preset:
        """The version of `name` with this content: a new one, unless there is one already.

        Raises ApiError for what is too much, and where the folder cannot be written.
        """
        assert _NAME.fullmatch(name), name
        wanted = Preset(
            name=name,
            version=1,
            description=description,
            steering=steering,
            checkpoint=checkpoint,
            created=int(time.time()),
        )
        with _storage_errors("written"), self._writing():
            same = [preset for preset in self.versions(name) if preset.fingerprint == wanted.fingerprint]
            if same:
                return same[0]
            self._check_room(name)
            number = 1 + max(self._files(name), default=0)
            preset = Preset(**{**_fields(wanted), "version": number})
            self._publish(preset)
        return preset

    def delete(self, preset_id: str, *, param: str = "preset") -> list[int]:
        """Delete `name@version`, or every version of `name`; returns the numbers. Raises ApiError preset_not_found."""
        name, version = split_id(preset_id, param=param)
        with _storage_errors("written"), self._writing():
            numbers = [number for number in self._numbers(name) if version in (None, number)]
            if not numbers:
                message = f"there is no preset {preset_id} to delete"
                raise ApiError(404, message, code="preset_not_found", param=param)
            for number in numbers:
                # Before the file goes, or a crash in between would let its number come again.
                self._path(name, number, "gone").touch()
                _sync(self._folder / name)
                self._path(name, number, "json").unlink(missing_ok=True)
                self._read.pop(self._path(name, number, "json"), None)
            highest = max(self._files(name))
            for number in self._files(name):
                # The highest one remembers that those below were given.
                if number < highest:
                    self._path(name, number, "gone").unlink(missing_ok=True)
            _sync(self._folder / name)
        return numbers

    def _folders(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._folder) if _NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return []

    def _files(self, name: str) -> dict[int, set[str]]:
        """Number -> the endings that its files have, rising."""
        found: dict[int, set[str]] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.listdir(self._folder / name):
                match = _FILE.fullmatch(entry)
                if match is not None:
                    found.setdefault(int(match[1]), set()).add(match[2])
        return dict(sorted(found.items()))

    def _numbers(self, name: str) -> list[int]:
        """Of the versions that exist, rising. One that has both files is being deleted."""
        return [number for number, endings in self._files(name).items() if endings == {"json"}]

    def _path(self, name: str, number: int, ending: str) -> Path:
        return self._folder / name / f"{number}.{ending}"

    def _load(self, name: str, number: int) -> Preset | None:
        file = self._path(name, number, "json")
        try:
            state = file.stat()
            identity = (state.st_ino, state.st_mtime_ns, state.st_size)
            known = self._read.get(file)
            if known is None or known[0] != identity:
                known = (identity, _parse(file, name, number))
                self._read[file] = known
            return known[1]
        except FileNotFoundError:
            return None

    def _check_room(self, name: str) -> None:
        folders = self._folders()
        if name not in folders and len(folders) >= MAX_NAMES:
            message = f"there are {len(folders)} preset names and at most {MAX_NAMES}; use one of them"
            raise ApiError(400, message, code="limit_exceeded", param="name")
        numbers = self._numbers(name)
        if len(numbers) >= MAX_VERSIONS:
            message = f"preset {name} has {len(numbers)} versions and at most {MAX_VERSIONS}; delete some"
            raise ApiError(400, message, code="limit_exceeded", param="name")

    def _publish(self, preset: Preset) -> None:
        content = json.dumps({"format": _FORMAT, "fingerprint": preset.fingerprint, **_fields(preset)}, indent=1)
        if len(content) > MAX_FILE_BYTES:
            message = f"the preset takes {len(content)} bytes and may take {MAX_FILE_BYTES}; name fewer concepts"
            raise ApiError(400, message, code="limit_exceeded", param="steering")
        folder = self._folder / preset.name
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", delete=True) as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
            # Fails, where a rename would replace, if the number is taken.
            os.link(file.name, self._path(preset.name, preset.version, "json"))
        _sync(folder)
        _sync(self._folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time, of all processes; a crashed one is none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / ".lock", "ab") as lock:
            end = time.monotonic() + _LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(random.uniform(0, 2 * _LOCK_PAUSE_S))
            yield


def _fields(preset: Preset) -> dict[str, Any]:
    return asdict(preset)


def _parse(file: Path, name: str, number: int) -> Preset | None:
    """What a file holds; None, with a line in the log, if it is not what was written."""
    try:
        content = file.read_bytes()
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has {len(content)} bytes, more than {MAX_FILE_BYTES}")
        fields = json.loads(content)
        version, fingerprint = fields.pop("format"), fields.pop("fingerprint")
        preset = Preset(**fields)
        if (version, preset.name, preset.version) != (_FORMAT, name, number) or preset.fingerprint != fingerprint:
            raise ValueError("its content is not that of its name and fingerprint")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.error("preset file %s is skipped: %s", file, error)
        return None
    return preset


@contextmanager
def _storage_errors(deed: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.exception("a preset could not be %s", deed)
        message = f"presets cannot be {deed} here ({error.strerror}); the server's log has the details"
        raise ApiError(503, message, code="presets_unavailable", type=SERVER_ERROR, retry_after_s=5) from error


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[-10:]))
    return shown if len(numbers) <= 10 else f"{shown} and older ones"
