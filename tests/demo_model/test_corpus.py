"""The definitions file, its labels and its split."""

from __future__ import annotations

import pytest

from demo_model.build_definitions import build_lines, definition_of, parse_synset
from demo_model.classifier import TopicClassifier
from demo_model.corpus import DOMAIN_GROUP, MIN_DOMAIN_DEFINITIONS, Corpus, load_corpus
from demo_model.topics import TOPICS


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_the_definitions_file_is_complete(corpus: Corpus) -> None:
    definitions = [*corpus.train, *corpus.held_out]
    assert len(definitions) == 117_791
    assert {definition.topic for definition in definitions} == set(range(len(TOPICS)))
    assert all(definition.text.strip() == definition.text != "" for definition in definitions)
    assert sum(bool(definition.domains) for definition in definitions) > 5_000


def test_two_percent_are_held_out_and_never_trained_on(corpus: Corpus) -> None:
    assert 0.015 < len(corpus.held_out) / len(corpus.train) < 0.025
    assert not {item.text for item in corpus.held_out} & {item.text for item in corpus.train}


def test_the_topics_come_first_and_names_are_unique(corpus: Corpus) -> None:
    names = [concept.name for concept in corpus.concepts]
    assert names[: len(TOPICS)] == [topic.name for topic in TOPICS]
    assert len(set(names)) == len(names)
    fields = corpus.concepts[len(TOPICS) :]
    assert {"law", "music", "chemistry", "military"} <= {concept.name for concept in fields}
    assert all(concept.num_definitions >= MIN_DOMAIN_DEFINITIONS for concept in fields)
    assert all(concept.group == DOMAIN_GROUP and concept.description for concept in fields)


def test_labels_hold_the_topic_and_the_fields(corpus: Corpus) -> None:
    definition = next(item for item in corpus.train if item.domains == ("law",))
    names = [corpus.concepts[label].name for label in corpus.labels([definition])[0]]
    assert names == [TOPICS[definition.topic].name, "law"]


@pytest.mark.parametrize(
    ("gloss", "definition"),
    [
        ('draw air in; "Inhale deeply"; "inhale the fresh air"', "draw air in"),
        ('the phrase "the call of duty"', 'the phrase "the call of duty"'),
        ("a  tangible entity; one that can  cast a shadow  ", "a tangible entity; one that can cast a shadow"),
        ('"He is respected"', ""),
    ],
)
def test_a_definition_is_the_gloss_without_its_examples(gloss: str, definition: str) -> None:
    assert definition_of(gloss) == definition


def test_a_line_of_the_database_becomes_a_line_of_the_file() -> None:
    field = "06161718 09 n 02 law 0 jurisprudence 0 001 @ 06153846 n 0000 | the branch concerned with law"
    word = '00001234 04 n 01 plea 0 002 @ 00001235 n 0000 ;c 06161718 n 0000 | a defendant\'s answer; "a plea"'
    assert build_lines([parse_synset(field), parse_synset(word)]) == [
        "domain\tlaw\tthe branch concerned with law",
        "4\tlaw\ta defendant's answer",
        "9\t\tthe branch concerned with law",
    ]


def test_the_classifier_finds_the_topic_of_three_in_four_held_out_definitions(corpus: Corpus) -> None:
    assert 0.74 < TopicClassifier(corpus.train).accuracy(corpus.held_out) < 0.80
