"""Presets on disk: versions that never change, for several processes at once."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app import presets
from serve_app.errors import ApiError
from serve_app.presets import PresetStore, split_id
from tests.processes import DEADLINE_S

STEERING = {"interventions": [], "suppress": [{"concept": {"id": 1, "name": "A"}, "strength": 2.0}]}


def content(strength: float) -> dict:
    return {"interventions": [], "suppress": [{"concept": {"id": 1, "name": "A"}, "strength": strength}]}


@pytest.fixture
def store(tmp_path: Path) -> PresetStore:
    return PresetStore(tmp_path / "presets")


def code_of(call) -> str:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value.code


def test_a_new_name_begins_with_version_one(store):
    preset = store.add("bookish", "likes books", STEERING, "c")
    assert (preset.id, preset.description, preset.steering) == ("bookish@1", "likes books", STEERING)
    assert store.get("bookish") == store.get("bookish@1") == preset


def test_the_same_content_is_the_same_version_and_other_content_the_next(store):
    first = store.add("bookish", "", content(1.0), "c")
    assert store.add("bookish", "", content(1.0), "c") == first
    assert store.add("bookish", "", content(2.0), "c").version == 2
    assert store.add("bookish", "said otherwise", content(2.0), "c").version == 3
    assert store.add("bookish", "", content(2.0), "another checkpoint").version == 4
    assert store.add("bookish", "", content(1.0), "c") == first, "not only the latest one is compared"
    assert [preset.version for preset in store.versions("bookish")] == [1, 2, 3, 4]
    assert store.add("other", "", content(1.0), "c").version == 1


def test_another_process_and_a_restart_see_what_was_kept(store, tmp_path):
    other = PresetStore(tmp_path / "presets")
    assert other.names() == []
    first = store.add("bookish", "", content(1.0), "c")
    assert other.get("bookish") == first
    second = other.add("bookish", "", content(2.0), "c")
    assert store.get("bookish") == second
    store.delete("bookish@2")
    assert other.get("bookish") == first


def test_a_number_is_never_given_again(store):
    for strength in (1.0, 2.0, 3.0):
        store.add("bookish", "", content(strength), "c")
    assert store.delete("bookish@3") == [3]
    assert store.get("bookish").version == 2
    assert store.add("bookish", "", content(4.0), "c").version == 4
    assert store.delete("bookish") == [1, 2, 4]
    assert store.names() == []
    assert store.add("bookish", "", content(1.0), "c").version == 5


def test_a_crash_in_the_middle_of_deleting_leaves_a_deleted_version(store, tmp_path):
    store.add("bookish", "", content(1.0), "c")
    (tmp_path / "presets" / "bookish" / "1.gone").touch()
    assert store.names() == []
    assert code_of(lambda: store.get("bookish@1")) == "preset_not_found"
    assert store.add("bookish", "", content(1.0), "c").version == 2


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 64])
def test_a_good_name_is_taken(store, name):
    store.add(name, "", STEERING, "c")
    assert store.names() == [name]
    assert split_id(f"{name}@12", param="p") == (name, 12)


BAD_IDS = ["", ".", "..", "../a", "a/b", ".hidden", "-x", "a b", "a\n", "a\x00", "é", "x" * 65, "/etc", "a\\b"]
BAD_VERSIONS = ["a@", "a@0", "a@-1", "a@01", "a@1.0", "a@1@2", "a@99999999999", "a@x", "a@\u0661"]


@pytest.mark.parametrize("preset_id", [*BAD_IDS, *BAD_VERSIONS], ids=ascii)
def test_what_is_no_name_is_not_found_and_touches_no_file(store, tmp_path, preset_id):
    (tmp_path / "1.json").write_text("{}")
    assert code_of(lambda: store.get(preset_id)) == "preset_not_found"
    assert code_of(lambda: store.delete(preset_id)) == "preset_not_found"
    assert store.versions(preset_id) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["1.json"]


@given(st.text(max_size=70))
def test_no_text_leads_out_of_the_folder(text):
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "presets"
        kept = PresetStore(inner)
        kept.add("bookish", "", STEERING, "c")
        (Path(folder) / "1.json").write_text((inner / "bookish" / "1.json").read_text())
        try:
            assert kept.get(text).name == "bookish"
        except ApiError as error:
            assert error.code == "preset_not_found"


def test_a_missing_one_is_told_with_those_there_are(store):
    store.add("bookish", "", STEERING, "c")
    with pytest.raises(ApiError, match="has no version 7; it has 1"):
        store.get("bookish@7")
    with pytest.raises(ApiError, match="no preset is called 'other'"):
        store.get("other")


CORRUPTIONS = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "changed": lambda text: text.replace("2.0", "9.0"),
    "of another name": lambda text: text.replace("bookish", "other"),
    "of a later format": lambda text: text.replace('"format": 1', '"format": 2'),
    "a list": lambda text: "[]",
    "with more keys": lambda text: text.replace('"format"', '"more": 1, "format"'),
    "huge": lambda text: text + " " * presets.MAX_FILE_BYTES,
    "deep": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupt_file_is_reported_once_and_skipped(store, tmp_path, caplog, corrupt):
    good = store.add("bookish", "", content(1.0), "c")
    store.add("bookish", "", content(2.0), "c")
    file = tmp_path / "presets" / "bookish" / "2.json"
    file.write_text(corrupt(file.read_text()))
    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        logging.getLogger("ray.serve").addHandler(caplog.handler)
        try:
            assert store.get("bookish") == good
            assert store.versions("bookish") == [good]
            assert code_of(lambda: store.get("bookish@2")) == "preset_not_found"
        finally:
            logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert len({record.getMessage() for record in caplog.records if "2.json" in record.getMessage()}) == 1
    assert store.add("bookish", "", content(3.0), "c").version == 3, "its number counts as given"


def test_foreign_files_are_let_be(store, tmp_path):
    store.add("bookish", "", STEERING, "c")
    folder = tmp_path / "presets"
    (folder / "notes.txt").write_text("hello")
    (folder / "bookish" / ".new-left-by-a-crash").write_text("{")
    (folder / "bookish" / "01.json").write_text("{")
    (folder / "bookish" / "2.json.bak").write_text("{")
    assert store.names() == ["bookish"]
    assert [preset.version for preset in store.versions("bookish")] == [1]
    assert store.add("bookish", "", content(9.0), "c").version == 2


def test_there_is_a_limit_to_names_versions_and_size(store, monkeypatch):
    monkeypatch.setattr(presets, "MAX_NAMES", 2)
    monkeypatch.setattr(presets, "MAX_VERSIONS", 2)
    store.add("a", "", content(1.0), "c")
    store.add("b", "", content(1.0), "c")
    assert code_of(lambda: store.add("c", "", content(1.0), "c")) == "limit_exceeded"
    store.add("a", "", content(2.0), "c")
    assert code_of(lambda: store.add("a", "", content(3.0), "c")) == "limit_exceeded"
    assert store.add("a", "", content(1.0), "c").version == 1, "what is there already needs no room"
    store.delete("a@1")
    assert store.add("a", "", content(3.0), "c").version == 3
    assert code_of(lambda: store.add("b", "x" * presets.MAX_FILE_BYTES, {}, "c")) == "limit_exceeded"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    tmp_path.chmod(0o500)
    assert code_of(lambda: PresetStore(tmp_path / "presets").add("a", "", STEERING, "c")) == "presets_unavailable"


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    kept = PresetStore(tmp_path / "file" / "presets")
    assert code_of(lambda: kept.add("a", "", STEERING, "c")) == "presets_unavailable"


def test_a_folder_that_cannot_be_read_is_told(tmp_path):
    """Writing told of it and reading did not: a request that names a preset, or a listing, was answered 500."""
    (tmp_path / "file").write_text("")
    assert code_of(PresetStore(tmp_path / "file").names) == "presets_unavailable"
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "1.json").symlink_to("1.json")
    for read in (PresetStore(tmp_path).get, PresetStore(tmp_path).versions):
        assert code_of(lambda read=read: read("loop")) == "presets_unavailable"


NUM_ROUNDS = 10


def post_many(folder: str, worker: int, start, results) -> None:
    store = PresetStore(folder)
    start.wait()
    mine = []
    for round_ in range(NUM_ROUNDS):
        # What all of them post, what only this one posts, and now and then a deletion of what is its own.
        shared = store.add("shared", "", content(float(round_)), "c")
        own = store.add("shared", f"worker {worker}", content(float(round_)), "c")
        mine.append((shared.id, shared.fingerprint))
        mine.append((own.id, own.fingerprint))
        if round_ % 5 == 4:
            store.delete(own.id)
    results.put(mine)


def test_several_processes_that_post_and_delete_at_once_never_share_a_number(tmp_path):
    # Not `spawn`, which would import Ray three times over.
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    folder = str(tmp_path / "presets")
    workers = [context.Process(target=post_many, args=(folder, i, start, results)) for i in range(3)]
    for worker in workers:
        worker.start()
    start.set()
    seen = [item for _ in workers for item in results.get(timeout=DEADLINE_S)]
    for worker in workers:
        worker.join(DEADLINE_S)
        assert worker.exitcode == 0
    contents: dict[str, set[str]] = {}
    for preset_id, fingerprint in seen:
        contents.setdefault(preset_id, set()).add(fingerprint)
    assert all(len(found) == 1 for found in contents.values()), "a version has had two contents"
    numbers = Counter(fingerprint for found in contents.values() for fingerprint in found)
    assert set(numbers.values()) == {1}, "one content has had two versions"
    assert len(contents) == NUM_ROUNDS + 3 * NUM_ROUNDS
    kept = PresetStore(folder).versions("shared")
    assert len(kept) == NUM_ROUNDS + 3 * (NUM_ROUNDS - 2)
    assert not list((tmp_path / "presets").rglob(".new-*"))


class AgainstAList(RuleBasedStateMachine):
    """Two stores of one folder against a list of all that was ever given a number."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.stores = [PresetStore(Path(self.folder.name) / "p") for _ in range(2)]
        self.given: list[tuple[float, bool]] = []
        """By number from 1: the content, and whether it is there."""

    def teardown(self):
        self.folder.cleanup()

    @rule(which=st.integers(0, 1), strength=st.integers(0, 3))
    def add(self, which, strength):
        there = [i for i, (value, is_there) in enumerate(self.given, 1) if is_there and value == strength]
        preset = self.stores[which].add("n", "", content(float(strength)), "c")
        if not there:
            self.given.append((strength, True))
        assert preset.version == (there[0] if there else len(self.given))

    @rule(which=st.integers(0, 1), number=st.integers(1, 6))
    def delete(self, which, number):
        if number <= len(self.given) and self.given[number - 1][1]:
            assert self.stores[which].delete(f"n@{number}") == [number]
            self.given[number - 1] = (self.given[number - 1][0], False)
        else:
            assert code_of(lambda: self.stores[which].delete(f"n@{number}")) == "preset_not_found"

    @invariant()
    def agrees(self):
        expected = [(i, float(value)) for i, (value, is_there) in enumerate(self.given, 1) if is_there]
        for store in self.stores:
            found = [(p.version, p.steering["suppress"][0]["strength"]) for p in store.versions("n")]
            assert found == expected
            assert store.names() == (["n"] if expected else [])


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)


def test_a_file_says_what_it_holds_to_whoever_opens_it(store, tmp_path):
    preset = store.add("bookish", "likes books", STEERING, "c")
    written = json.loads((tmp_path / "presets" / "bookish" / "1.json").read_text())
    assert written["steering"] == STEERING and written["fingerprint"] == preset.fingerprint
