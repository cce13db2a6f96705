"""Definitions, the concepts they are labelled with, and the split into training and held-out text."""

from __future__ import annotations

import hashlib
import lzma
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .topics import TOPICS

DEFINITIONS_FILE = Path(__file__).parent / "definitions.tsv.xz"
MIN_DOMAIN_DEFINITIONS = 25
"""A domain becomes a concept when so many training definitions carry it: fewer do not show its words."""
NOT_FIELDS = frozenset({"Yiddish", "antiquity"})
"""Domains that mark where a word comes from rather than what it is about."""
HELD_OUT_ONE_IN = 50
DOMAIN_GROUP = "fields"


@dataclass(frozen=True, slots=True)
class Definition:
    """One definition and its labels."""

    text: str
    topic: int
    """Index into TOPICS."""
    domains: tuple[str, ...]

    @property
    def is_held_out(self) -> bool:
        """Decided by the text alone, so that equal definitions stay on one side."""
        digest = hashlib.sha256(self.text.encode("utf-8")).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Concept:
    """One known concept: a topic or a domain. Its id is its place in `Corpus.concepts`."""

    name: str
    description: str
    group: str
    num_definitions: int
    """Training definitions that carry it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """All definitions and the concepts they are labelled with: the 45 topics first, then domains by name."""

    train: tuple[Definition, ...]
    held_out: tuple[Definition, ...]
    concepts: tuple[Concept, ...]

    def labels(self, definitions: Sequence[Definition]) -> list[tuple[int, ...]]:
        """Concept ids of each definition, its topic first."""
        ids = {concept.name: index for index, concept in enumerate(self.concepts) if concept.group == DOMAIN_GROUP}
        labels = []
        for definition in definitions:
            names = [domain_concept_name(domain) for domain in definition.domains]
            labels.append((definition.topic, *(ids[name] for name in names if name in ids)))
        return labels

    def largest_topics(self, count: int) -> list[int]:
        """Ids of the topics with the most training definitions, largest first."""
        topics = range(len(TOPICS))
        return sorted(topics, key=lambda topic: -self.concepts[topic].num_definitions)[:count]


def domain_concept_name(domain: str) -> str:
    """A domain's name as a concept, told apart from a topic of the same name."""
    return f"{domain} (field)" if domain in {topic.name for topic in TOPICS} else domain


def read_definitions(path: Path = DEFINITIONS_FILE) -> tuple[list[Definition], dict[str, str]]:
    """The definitions, and each domain's own definition, from the compressed file."""
    definitions: list[Definition] = []
    domains: dict[str, str] = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            first, second, text = line.rstrip("\n").split("\t")
            if first == "domain":
                domains[second] = text
            else:
                names = tuple(second.split("|")) if second else ()
                definitions.append(Definition(text=text, topic=int(first), domains=names))
    return definitions, domains


def load_corpus(path: Path = DEFINITIONS_FILE) -> Corpus:
    """Read the definitions and choose the concepts."""
    definitions, domain_texts = read_definitions(path)
    train = tuple(definition for definition in definitions if not definition.is_held_out)
    held_out = tuple(definition for definition in definitions if definition.is_held_out)
    topic_counts = Counter(definition.topic for definition in train)
    domain_counts = Counter(name for definition in train for name in definition.domains)
    concepts = [
        Concept(topic.name, topic.description, topic.group, topic_counts[index]) for index, topic in enumerate(TOPICS)
    ]
    for name in sorted(domain_counts):
        if domain_counts[name] >= MIN_DOMAIN_DEFINITIONS and name not in NOT_FIELDS:
            text = domain_texts[name]
            concepts.append(
                Concept(domain_concept_name(name), text[:1].upper() + text[1:], DOMAIN_GROUP, domain_counts[name])
            )
    return Corpus(train=train, held_out=held_out, concepts=tuple(concepts))
