"""A trace: the ordered commits of one generation, enough to replay it. How it is made, checked, written and read.

Plain frozen data, picklable, without torch and without the checkpoint: what a trace means to a model is checked where
it is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import groupby
from typing import Any, TypeVar

from .checks import is_list, is_number, is_whole, shown
from .errors import InvalidValue
from .limits import MAX_CFG_SCALE
from .output import Commit, Output
from .request import GenerateRequest, Intervention, SteeringParams, Suppression, WeightOverride

T = TypeVar("T")

TRACE_VERSION = 1
"""Of the form that `Trace.to_dict` writes."""


@dataclass(frozen=True, slots=True)
class TracedCommit:
    """One commit of a trace."""

    position: int
    """Absolute, prompt included."""
    token_id: int
    denoising_step: int
    """Counted over the whole generation; commits of one step did not see each other."""
    target_logit: float | None = None
    """The token's raw logit as it was recorded, for a replay to be held against. None: not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The ordered commits of one generation, enough to replay it: what the model saw before each of its steps.

    Raises InvalidValue for steps that leave a gap or go back, and for positions that are no generated ones or that
    are committed twice.
    """

    prompt_token_ids: tuple[int, ...] | list[int]
    max_tokens: int
    commits: tuple[TracedCommit, ...] | list[TracedCommit]
    """In the order of their steps."""
    steering: SteeringParams | None = None
    cfg_scale: float = 0.0
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Tokens that end the text where they are committed, beside the checkpoint's end-of-turn token: what stands right
    of an end in its block becomes end-of-text."""
    ignore_eos: bool = False
    """The checkpoint's end-of-turn token was an ordinary one."""

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "stop_token_ids"):
            value = getattr(self, name)
            if not (is_list(value) and all(map(is_whole, value))):
                raise _refusal(name, value, "a list or tuple of token ids")
            object.__setattr__(self, name, tuple(value))
        if not is_whole(self.max_tokens, 1):
            raise _refusal("max_tokens", self.max_tokens, "a whole number at least 1")
        if self.steering is not None and not isinstance(self.steering, SteeringParams):
            raise _refusal("steering", self.steering, "SteeringParams or None")
        if not is_number(self.cfg_scale, 0, MAX_CFG_SCALE):
            raise _refusal("cfg_scale", self.cfg_scale, f"a number from 0 to {MAX_CFG_SCALE:g}")
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", self.ignore_eos, "True or False")
        if not (is_list(self.commits) and all(isinstance(commit, TracedCommit) for commit in self.commits)):
            raise _refusal("commits", self.commits, "a list or tuple of TracedCommit")
        object.__setattr__(self, "commits", tuple(self.commits))
        self._check_commits()

    def _check_commits(self) -> None:
        start, seen, step = len(self.prompt_token_ids), set[int](), -1
        stop = start + self.max_tokens
        for index, commit in enumerate(self.commits):
            name = f"commits[{index}]"
            if not is_whole(commit.position, start, stop - 1):
                raise _refusal(f"{name}.position", commit.position, f"a generated one, in [{start}, {stop})")
            if commit.position in seen:
                raise InvalidValue(f"position {commit.position} is committed twice", param=f"trace.{name}.position")
            if not is_whole(commit.token_id, 0):
                raise _refusal(f"{name}.token_id", commit.token_id, "a token id")
            if not is_whole(commit.denoising_step, max(step, 0), step + 1):
                rule = f"{step} or {step + 1}: steps count from 0 on, without a gap"
                raise _refusal(f"{name}.denoising_step", commit.denoising_step, rule if index else "0")
            if not (commit.target_logit is None or is_number(commit.target_logit)):
                raise _refusal(f"{name}.target_logit", commit.target_logit, "a finite number or None")
            seen.add(commit.position)
            step = commit.denoising_step

    @property
    def limit(self) -> int:
        """Positions at or past it do not exist: prompt and max_tokens together."""
        return len(self.prompt_token_ids) + self.max_tokens

    def steps(self) -> Iterator[tuple[TracedCommit, ...]]:
        """The commits of each denoising step in turn."""
        for _, commits in groupby(self.commits, key=lambda commit: commit.denoising_step):
            yield tuple(commits)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON can hold it."""
        return {
            "version": TRACE_VERSION,
            "prompt_token_ids": list(self.prompt_token_ids),
            "max_tokens": self.max_tokens,
            "commits": [asdict(commit) for commit in self.commits],
            "steering": None if self.steering is None else _plain(asdict(self.steering)),
            "cfg_scale": self.cfg_scale,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }

    @classmethod
    def from_dict(cls, raw: object) -> Trace:
        """What `to_dict` wrote, read back. Raises InvalidValue for another version, an unknown key or a wrong value."""
        values = _object(raw, "trace")
        version = values.pop("version", None)
        if version != TRACE_VERSION:
            raise InvalidValue(
                f"version is {shown(version)}; this engine reads version {TRACE_VERSION}", param="trace.version"
            )
        if "commits" in values:
            values["commits"] = _read_list(TracedCommit, values["commits"], "trace.commits")
        if values.get("steering") is not None:
            values["steering"] = _read_steering(values["steering"], "trace.steering")
        return _read(cls, values, "trace")


def trace_of(request: GenerateRequest, output: Output) -> Trace:
    """The trace of a generation: what was asked and what came of it. Raises InvalidValue if the two do not belong.

    A generation that was aborted has one too: that of the commits which were handed out.
    """
    sampling = request.sampling
    if output.num_prompt_tokens != len(request.prompt_token_ids):
        raise InvalidValue(
            f"the output is that of a prompt of {output.num_prompt_tokens} tokens and the request's has "
            f"{len(request.prompt_token_ids)}; give the request that it answers"
        )
    return Trace(
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        commits=tuple(_numbered(output.commits)),
        steering=request.steering,
        cfg_scale=sampling.cfg_scale,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def _numbered(commits: tuple[Commit, ...]) -> Iterator[TracedCommit]:
    # A step whose commits nobody got, because its request was preempted, leaves a gap in the numbers.
    for step, (_, group) in enumerate(groupby(commits, key=lambda commit: commit.denoising_step)):
        for commit in group:
            yield TracedCommit(commit.position, commit.token_id, step, commit.target_logit)


def _refusal(name: str, value: object, rule: str) -> InvalidValue:
    return InvalidValue(f"{name} is {shown(value)}; it must be {rule}", param=f"trace.{name}")


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _object(raw: object, path: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise InvalidValue(f"{path} is {shown(raw)}; it must be an object", param=path)
    return dict(raw)


def _read(kind: type[T], raw: object, path: str) -> T:
    """An object as a dataclass; every key known, none missing that has no default."""
    values = _object(raw, path)
    own = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in values if key not in own)
    if unknown:
        raise InvalidValue(f"{path} has keys that it cannot have: {', '.join(unknown)}", param=path)
    missing = [
        name
        for name, field in own.items()
        if name not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise InvalidValue(f"{path} lacks {', '.join(missing)}", param=path)
    return kind(**values)


def _read_list(kind: type[T], raw: object, path: str) -> tuple[T, ...]:
    if not is_list(raw):
        raise InvalidValue(f"{path} is {shown(raw)}; it must be a list", param=path)
    return tuple(_read(kind, item, f"{path}[{index}]") for index, item in enumerate(raw))


def _read_steering(raw: object, path: str) -> SteeringParams:
    values = _object(raw, path)
    kinds: dict[str, type] = {"interventions": Intervention, "suppress": Suppression, "overrides": WeightOverride}
    for name, kind in kinds.items():
        if name in values:
            values[name] = _read_list(kind, values[name], f"{path}.{name}")
    return _read(SteeringParams, values, path)
