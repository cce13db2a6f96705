"""Steering presets over HTTP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.presets import PresetStore

pytestmark = pytest.mark.anyio
PATH = "/v1/steering/presets"
SHORT = {"concepts": ["music"], "strength": 3}


@pytest.fixture
def target(server, tmp_path):
    return server(presets=PresetStore(tmp_path / "presets"))


async def post(target, name="bookish", steering=SHORT, **more):
    return await target.post({"name": name, "steering": steering, **more}, PATH)


async def delete(target, path):
    async with target.client() as client:
        return await client.delete(path)


async def test_a_label_is_kept_as_an_id_and_every_default_is_spelled_out(target):
    answer = (await post(target, description="sings")).json()
    assert (answer["id"], answer["version"], answer["object"]) == ("bookish@1", 1, "steering.preset")
    assert answer["steering"] == {
        "interventions": [
            {
                "concepts": [{"id": 2, "name": "Music", "weight": 1.0}],
                "strength": 3.0,
                "unit": "logits",
                "layer": 1,
                "schedule": "hard_cutoff",
                "cutoff_tokens": 32,
            }
        ],
        "suppress": [],
        "overrides": [],
        "override_mode": "delta",
    }
    assert answer["description"] == "sings" and answer["is_compatible"] and len(answer["fingerprint"]) == 32


async def test_groups_are_kept_as_their_members(target):
    steering = {
        "interventions": [{"concepts": [{"id": 0, "weight": 2.0}], "strength": -1.5, "group": True}],
        "suppress": [{"concept": "Music", "strength": 4}],
    }
    kept = (await post(target, steering=steering)).json()["steering"]
    assert [(c["id"], c["weight"]) for c in kept["interventions"][0]["concepts"]] == [(0, 2.0), (1, 2.0)]
    assert kept["interventions"][0]["layer"] == 1
    assert kept["suppress"] == [{"concept": {"id": 2, "name": "Music"}, "strength": 4.0}]


async def test_versions_are_listed_and_found_by_number(target):
    await post(target)
    await post(target, steering={"concepts": [2], "strength": 3})
    second = (await post(target, steering={"concepts": [2], "strength": 4})).json()
    assert second["version"] == 2, "an id and its label are the same content"
    latest = (await target.get(f"{PATH}/bookish")).json()
    assert (latest["version"], latest["versions"]) == (2, [1, 2])
    for found in (await target.get(f"{PATH}/bookish@1"), await target.get(f"{PATH}/bookish", version=1)):
        assert (found.json()["version"], found.json()["steering"]["interventions"][0]["strength"]) == (1, 3.0)
    both = await target.get(f"{PATH}/bookish@1", version=1)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "version")


async def test_names_are_listed_page_by_page(target):
    for name in ("c", "a", "b"):
        await post(target, name)
    first = (await target.get(PATH, limit=2)).json()
    assert ([p["name"] for p in first["data"]], first["total"], first["has_more"]) == (["a", "b"], 3, True)
    second = (await target.get(PATH, limit=2, offset=2)).json()
    assert ([p["name"] for p in second["data"]], second["has_more"]) == (["c"], False)


async def test_a_version_or_a_name_is_deleted(target):
    await post(target)
    await post(target, steering={"concepts": [2], "strength": 4})
    one = (await delete(target, f"{PATH}/bookish@1")).json()
    assert (one["id"], one["deleted"], one["versions"]) == ("bookish@1", True, [1])
    assert (await target.get(f"{PATH}/bookish@1")).status_code == 404
    assert (await delete(target, f"{PATH}/bookish")).json()["versions"] == [2]
    gone = await delete(target, f"{PATH}/bookish")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "preset_not_found")
    assert (await target.get(PATH)).json()["total"] == 0


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"steering": SHORT}, "invalid_value", "name"),
        ({"name": "../x", "steering": SHORT}, "invalid_value", "name"),
        ({"name": "a\n", "steering": SHORT}, "invalid_value", "name"),
        ({"name": "x" * 65, "steering": SHORT}, "invalid_value", "name"),
        ({"name": "a"}, "invalid_value", "steering"),
        ({"name": "a", "steering": {}}, "invalid_value", "steering"),
        ({"name": "a", "steering": SHORT, "description": "x" * 2001}, "invalid_value", "description"),
        (
            {"name": "a", "steering": {"concepts": ["nobody"], "strength": 1}},
            "concept_not_found",
            "steering.concepts[0]",
        ),
        ({"name": "a", "steering": {"concepts": [3], "strength": 1}}, "concept_not_steerable", "steering.concepts[0]"),
        (
            {"name": "a", "steering": {"suppress": [{"concept": 999, "strength": 1}]}},
            "concept_not_found",
            "steering.suppress[0].concept",
        ),
        (
            {"name": "a", "steering": {"interventions": [{"concepts": [2], "strength": 1, "layer": 3}]}},
            "invalid_value",
            "steering.interventions[0].layer",
        ),
        (
            {"name": "a", "steering": {"interventions": [{"concepts": [2], "strenght": 1}]}},
            "invalid_value",
            "steering.interventions[0].strenght",
        ),
        ({"name": "a", "steering": {"preset": "other", **SHORT}}, None, "steering.preset"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_this_checkpoint_could_not_do_is_refused_by_name_and_not_kept(target, body, code, param):
    response = await target.post(body, PATH)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert code in (None, error["code"])
    assert (await target.get(PATH)).json()["total"] == 0


@pytest.mark.parametrize("path", ["nobody", "nobody@1", "%2e%2e", "a%2fb", "bookish@0"])
async def test_a_missing_one_is_a_404(target, path):
    await post(target)
    response = await target.get(f"{PATH}/{path}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] in ("preset_not_found", "not_found")


async def test_a_preset_of_another_checkpoint_says_so(server, served, target, tmp_path):
    await post(target)
    other = server(presets=PresetStore(tmp_path / "presets"))
    config = replace(served.config, n_layers=4)
    other.app.state.service = replace(other.app.state.service, checkpoint=replace(served, config=config))
    assert not (await other.get(f"{PATH}/bookish")).json()["is_compatible"]
    again = (await post(other)).json()
    assert (again["version"], again["is_compatible"]) == (2, True)


async def test_a_server_without_a_folder_keeps_none(server):
    response = await post(server())
    assert (response.status_code, response.json()["error"]["code"]) == (404, "preset_not_found")


async def test_a_folder_that_cannot_be_written_is_a_503_that_names_no_path(server, tmp_path):
    (tmp_path / "file").write_text("")
    response = await post(server(presets=PresetStore(tmp_path / "file" / "presets")))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "presets_unavailable")
    assert str(tmp_path) not in response.text
