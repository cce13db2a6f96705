from __future__ import annotations

import pandas as pd
import pytest

from engine import CheckpointError
from serve_app.concepts import Concept, ConceptCatalogue
from serve_app.errors import ApiError


@pytest.fixture(scope="session")
def catalogue(served) -> ConceptCatalogue:
    return served.catalogue


@pytest.fixture
def nameless(tmp_path, model_config) -> ConceptCatalogue:
    return ConceptCatalogue.from_checkpoint(tmp_path, model_config)


def test_discovered_concepts_are_numbered_after_the_known_ones(catalogue):
    assert len(catalogue) == 120
    assert catalogue.catalogue_id("known", 7) == 7
    assert catalogue.catalogue_id("discovered", 7) == 57
    concept = catalogue.get(50)
    assert (concept.head, concept.name, catalogue.local_id(concept)) == ("discovered", "Found thing", 0)
    assert (catalogue.get(-1), catalogue.get(120)) == (None, None)


def test_a_concept_without_a_row_has_no_name_and_known_ones_can_be_steered(catalogue):
    assert catalogue.get(49) == Concept(49, "known")
    assert catalogue.get(119) == Concept(119, "discovered", is_steerable=False)


def test_a_row_tells_group_and_flags(catalogue):
    assert catalogue.get(3).to_json() == {
        "object": "concept",
        "id": 3,
        "name": "Plants",
        "description": "things that grow in the earth",
        "head": "known",
        "group": {"id": 1, "name": "Nature"},
        "is_steerable": False,
        "is_tone": False,
        "is_alignment": False,
        "is_demographic": False,
    }


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("animal", [1, 0, 2]),  # whole word in the name, its beginning in the name, the description
        ("Animals", [0, 1]),  # the name itself, a description
        ("anim", [0, 1, 2]),  # only by its beginning
        ("SINGING", [2]),
        ("earth animals", [0, 1, 3]),
        ("nimal", []),  # not the middle of a word
        ("...", list(range(120))),
    ],
)
def test_search_ranks_names_above_descriptions_and_words_above_their_beginnings(catalogue, query, found):
    assert list(catalogue.search(query)) == found


def test_search_can_be_narrowed(catalogue):
    assert list(catalogue.search("things", steerable=True)) == [0]
    assert list(catalogue.search("", group="nature")) == [0, 1, 3]
    assert list(catalogue.search("", group="1", steerable=True)) == [0, 1]
    assert list(catalogue.search("", head="discovered")) == list(range(50, 120))
    assert list(catalogue.search("thing", head="known")) == [0, 3]
    assert list(catalogue.search("", group="none")) == []


def test_a_label_is_exact_but_for_its_case(catalogue):
    assert catalogue.steerable("ANIMAL HUSBANDRY", param="p").id == 1
    assert catalogue.steerable(1, param="p").id == 1


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        (120, "concept_not_found", r"\[0, 120\)"),
        (-1, "concept_not_found", "id -1"),
        ("anim", "concept_not_found", "0 'Animals', 1 'Animal husbandry'"),
        ("", "concept_not_found", "/v1/concepts"),
        ("Twin", "invalid_value", "4, 5"),
        (3, "concept_not_steerable", "Plants"),
        ("plants", "concept_not_steerable", "not steerable"),
        (50, "concept_not_steerable", "discovered concepts cannot be steered"),
        ("Found thing", "concept_not_steerable", "discovered"),
    ],
)
def test_a_name_that_cannot_be_steered_says_why_and_what_else(catalogue, name, code, told):
    with pytest.raises(ApiError, match=told) as caught:
        catalogue.steerable(name, param="steering.concepts[0]")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, "steering.concepts[0]")


def test_a_group_begins_with_the_concept_and_leaves_out_what_is_not_steerable(catalogue):
    assert [c.id for c in catalogue.group(catalogue.get(1))] == [1, 0]
    assert [c.id for c in catalogue.group(catalogue.get(49))] == [49]


def test_a_checkpoint_without_labels_works_by_id(nameless):
    assert nameless.steerable(3, param="p") == Concept(3, "known")
    assert list(nameless.search("", head="known")) == list(range(50))
    assert list(nameless.search("animal")) == []


def test_labels_beyond_the_model_are_refused(tmp_path, model_config):
    pd.DataFrame([{"concept_id": 120, "concept_name": "x"}]).to_parquet(tmp_path / "concept_labels.parquet")
    with pytest.raises(CheckpointError, match="concept 120; there are 120"):
        ConceptCatalogue.from_checkpoint(tmp_path, model_config)


def test_labels_without_names_are_refused(tmp_path, model_config):
    pd.DataFrame([{"concept_id": 1}]).to_parquet(tmp_path / "concept_labels.parquet")
    with pytest.raises(CheckpointError, match="lacks the columns concept_name"):
        ConceptCatalogue.from_checkpoint(tmp_path, model_config)
