"""The concept catalogue: names for ids, search, and what a caller may call a concept.

Two kinds of id exist. The engine's are local to a head. The catalogue's, which HTTP uses, number the known concepts
first and the discovered ones after them.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet

from engine import CheckpointError, Head, ModelConfig

from .errors import ApiError

LABELS_FILE = "concept_labels.parquet"

_COLUMNS = (
    "concept_id",
    "concept_name",
    "concept_description",
    "public_group_id",
    "group_name",
    "is_steerable",
    "is_tone",
    "is_alignment",
    "is_demographic",
)
_WORD = re.compile(r"\w+")
_NAME_WEIGHT = 6
_DESCRIPTION_WEIGHT = 2
_PREFIX_DISCOUNT = 2
"""A word that only begins with the searched one counts this many times less."""
_EXACT_NAME_WEIGHT = 24
_MAX_PREFIX_WORDS = 200
"""Longer words that one searched word may stand for, in alphabetical order; bounds the work of a short one."""


@dataclass(frozen=True, slots=True)
class Concept:
    """One row of the catalogue. A checkpoint without labels has concepts without names."""

    id: int
    head: Head
    name: str | None = None
    description: str | None = None
    group_id: int | None = None
    group_name: str | None = None
    is_steerable: bool = True
    """False for every discovered concept, and for the known ones whose row says so."""
    is_tone: bool = False
    is_alignment: bool = False
    is_demographic: bool = False

    def to_json(self) -> dict[str, Any]:
        """The API's form."""
        group = None if self.group_id is None else {"id": self.group_id, "name": self.group_name}
        return {
            "object": "concept",
            "id": self.id,
            "name": self.name,
            "description": self.description,
            "head": self.head,
            "group": group,
            "is_steerable": self.is_steerable,
            "is_tone": self.is_tone,
            "is_alignment": self.is_alignment,
            "is_demographic": self.is_demographic,
        }


class ConceptCatalogue:
    """Every concept of one checkpoint."""

    def __init__(self, concepts: Iterable[Concept], *, num_known: int, num_discovered: int) -> None:
        """`concepts` are the labelled ones, each id at most once. Raises CheckpointError for an id out of range."""
        self._num_known = num_known
        self._num_concepts = num_known + num_discovered
        self._by_id = {concept.id: concept for concept in concepts}
        self._by_name: dict[str, list[int]] = defaultdict(list)
        self._groups: dict[int, list[int]] = defaultdict(list)
        for concept in self._by_id.values():
            if not 0 <= concept.id < self._num_concepts:
                raise CheckpointError(f"{LABELS_FILE} labels concept {concept.id}; there are {self._num_concepts}")
            if concept.name is not None:
                self._by_name[concept.name.casefold()].append(concept.id)
            if concept.group_id is not None:
                self._groups[concept.group_id].append(concept.id)
        self._name_words = _index((c.id, c.name) for c in self._by_id.values())
        self._description_words = _index((c.id, c.description) for c in self._by_id.values())
        self._words = sorted({*self._name_words, *self._description_words})
        self._select = lru_cache(maxsize=16)(self._filter)

    @classmethod
    def from_checkpoint(cls, folder: str | Path, config: ModelConfig) -> ConceptCatalogue:
        """Read the labels beside the checkpoint; without the file every concept is nameless."""
        concept = config.concept
        num_known, num_discovered = concept.n_concepts, concept.n_discovered if concept.use_discovered else 0
        file = Path(folder) / LABELS_FILE
        rows = _read_rows(file, num_known) if file.is_file() else ()
        return cls(rows, num_known=num_known, num_discovered=num_discovered)

    def __len__(self) -> int:
        return self._num_concepts

    @cached_property
    def fingerprint(self) -> str:
        """The same for catalogues in which every id means the same and may be steered alike."""
        facts = [f"{self._num_known} {self._num_concepts}"]
        facts += [f"{i} {concept.name!r} {concept.is_steerable}" for i, concept in sorted(self._by_id.items())]
        return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()

    def catalogue_id(self, head: Head, local_id: int) -> int:
        """The engine's id -> the catalogue's."""
        return local_id if head == "known" else self._num_known + local_id

    def named(self, head: Head, local_id: int) -> dict[str, Any]:
        """The API's short form of a concept that the engine names by its id."""
        concept_id = self.catalogue_id(head, local_id)
        concept = self.get(concept_id)
        return {"id": concept_id, "name": None if concept is None else concept.name}

    def local_id(self, concept: Concept) -> int:
        """The catalogue's concept -> the engine's id within its head."""
        return concept.id if concept.head == "known" else concept.id - self._num_known

    def get(self, concept_id: int) -> Concept | None:
        """The concept with this catalogue id, or None."""
        if not 0 <= concept_id < self._num_concepts:
            return None
        known = concept_id < self._num_known
        nameless = Concept(concept_id, "known" if known else "discovered", is_steerable=known)
        return self._by_id.get(concept_id, nameless)

    def group(self, concept: Concept) -> list[Concept]:
        """The concept first, then the steerable other members of its public group."""
        members = self._groups[concept.group_id] if concept.group_id is not None else []
        others = (self._by_id[i] for i in members if i != concept.id)
        return [concept, *(other for other in others if other.is_steerable)]

    def find(self, name: int | str, *, param: str) -> Concept:
        """The concept that a caller means by an id or an exact label.

        Raises ApiError with `param`: concept_not_found, or invalid_value for a label that several concepts have.
        """
        concept = self._by_label(name, param) if isinstance(name, str) else self.get(name)
        if concept is None:
            message = f"no concept has the id {name}; ids lie in [0, {self._num_concepts})"
            raise ApiError(400, message, code="concept_not_found", param=param)
        return concept

    def steerable(self, name: int | str, *, param: str) -> Concept:
        """The concept that a caller means by an id or an exact label, if it can be steered.

        Raises ApiError as `find` does, or concept_not_steerable.
        """
        concept = self.find(name, param=param)
        if not concept.is_steerable:
            why = "discovered concepts cannot be steered" if concept.head == "discovered" else "it is not steerable"
            message = (
                f"concept {concept.id} ({concept.name or 'without a name'}): {why}; see /v1/concepts?steerable=true"
            )
            raise ApiError(400, message, code="concept_not_steerable", param=param)
        return concept

    def _by_label(self, label: str, param: str) -> Concept:
        found = [self._by_id[i] for i in self._by_name.get(label.casefold(), ())]
        if not found:
            similar = self.search(label, steerable=True)[:5] if _WORD.search(label) else []
            if not similar:
                alike = get_close_matches(label.casefold(), self._by_name, n=3)
                similar = [i for name in alike for i in self._by_name[name]]
            near = [f"{i} {self._by_id[i].name!r}" for i in similar]
            hint = f"; similar are {', '.join(near)}" if near else "; search with /v1/concepts?query="
            raise ApiError(400, f"no concept is called {label!r}{hint}", code="concept_not_found", param=param)
        candidates = [concept for concept in found if concept.is_steerable] or found
        if len(candidates) > 1:
            ids = ", ".join(str(concept.id) for concept in candidates[:20])
            message = f"{len(candidates)} concepts are called {label!r}; choose one by its id: {ids}"
            raise ApiError(400, message, code="invalid_value", param=param)
        return candidates[0]

    def search(
        self,
        query: str = "",
        *,
        head: Head | None = None,
        steerable: bool | None = None,
        group: str | None = None,
    ) -> Sequence[int]:
        """Ids of the concepts that match any word of `query`, best first; all of them, by id, where it has no word.

        Words match as a whole or by their beginning, and count more in a name than in a description. `group` is a
        group's id or its name, whatever its case.
        """
        words = [word.casefold() for word in _WORD.findall(query)]
        selected, allowed = self._select(head, steerable, group)
        if not words:
            return selected
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(words):
            self._score(word, scores)
        for i in self._by_name.get(query.strip().casefold(), ()):
            scores[i] += _EXACT_NAME_WEIGHT
        return sorted((i for i in scores if i in allowed), key=lambda i: (-scores[i], i))

    def _score(self, word: str, scores: Counter[int]) -> None:
        first = bisect_left(self._words, word)
        for candidate in self._words[first : first + _MAX_PREFIX_WORDS]:
            if not candidate.startswith(word):
                break
            divisor = 1 if candidate == word else _PREFIX_DISCOUNT
            for index, weight in (
                (self._name_words, _NAME_WEIGHT),
                (self._description_words, _DESCRIPTION_WEIGHT),
            ):
                for i in index.get(candidate, ()):
                    scores[i] += weight // divisor

    def _filter(
        self, head: Head | None, steerable: bool | None, group: str | None
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """Ids of the concepts that pass, in order and as a set."""
        wanted = group.casefold() if group is not None else None

        def matches(concept: Concept) -> bool:
            names = (str(concept.group_id), (concept.group_name or "").casefold())
            return (
                (head is None or concept.head == head)
                and (steerable is None or concept.is_steerable == steerable)
                and (wanted is None or (concept.group_id is not None and wanted in names))
            )

        concepts = (self.get(i) for i in range(self._num_concepts))
        passed = tuple(concept.id for concept in concepts if concept is not None and matches(concept))
        return passed, frozenset(passed)


def _index(texts: Iterable[tuple[int, str | None]]) -> dict[str, array[int]]:
    """Word -> ids of the concepts whose text has it, once for every time it does."""
    index: dict[str, array[int]] = {}
    for concept_id, text in texts:
        for word in _WORD.findall((text or "").casefold()):
            index.setdefault(word, array("l")).append(concept_id)
    return index


def _read_rows(file: Path, num_known: int) -> list[Concept]:
    table = pyarrow.parquet.read_table(file)
    missing = [name for name in ("concept_id", "concept_name") if name not in table.column_names]
    if missing:
        raise CheckpointError(f"{file} lacks the columns {', '.join(missing)}")
    columns = {name: table[name].to_pylist() for name in _COLUMNS if name in table.column_names}
    return [
        _concept(dict(zip(columns, values, strict=True)), num_known) for values in zip(*columns.values(), strict=True)
    ]


def _concept(row: dict[str, Any], num_known: int) -> Concept:
    """One row of the file. Absent columns and empty cells say nothing."""
    concept_id = int(row["concept_id"])
    is_known = concept_id < num_known
    group_id = row.get("public_group_id")
    flags = {name: bool(row.get(name)) for name in ("is_tone", "is_alignment", "is_demographic")}
    return Concept(
        id=concept_id,
        head="known" if is_known else "discovered",
        name=row.get("concept_name"),
        description=row.get("concept_description"),
        # Group ids may be stored as floating point, where an empty cell is NaN.
        group_id=None if group_id is None or group_id != group_id else int(group_id),
        group_name=row.get("group_name"),
        is_steerable=is_known and row.get("is_steerable") is not False,
        **flags,
    )
