"""Guidance, set weights and chat in a real browser, each against what a real server makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoint import describe
from tests.clients.checkpoint import MODEL_ID, write_instruct_variant
from tests.playground.conftest import why_not
from tests.playground.driving import SCRUB, add_slider, generate, prose, set_number, wait_for_end

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(600),
]

FIRST_DISCOVERED = 101
"""Of the demo model: known concepts come before it."""


def sent_and_answered(page: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last request, and its answer's chunks put over each other, as the raw view shows them."""
    page.click("text=Raw")
    request = json.loads(page.inner_text("[data-testid=raw-request]").partition("\n")[2])
    answer: dict[str, Any] = {}
    *chunks, end = page.inner_text("[data-testid=raw-answer]").split("\n\n")
    assert end == "[DONE]"
    for chunk in chunks:
        answer |= json.loads(chunk)
    page.get_by_label("Close", exact=True).click()
    return request, answer


def test_guidance_changes_the_text_of_the_same_seed_and_zero_gives_it_back(open_page):
    page = open_page()
    set_number(page, "Tokens", 24)
    generate(page)
    plain = prose(page)
    page.click("summary:has-text('Sampling')")
    set_number(page, "Guidance", 3)
    generate(page)
    assert prose(page) != plain
    request, answer = sent_and_answered(page)
    assert request["diffusion"] == {"cfg_scale": 3}
    assert answer["diffusion"]["cfg_scale"] == 3
    set_number(page, "Guidance", 0)
    generate(page)
    assert prose(page) == plain


def test_guidance_goes_into_links_and_code_and_stays_away_from_the_lossless_policy(open_page, site):
    page = open_page()
    set_number(page, "Tokens", 8)
    page.click("summary:has-text('Sampling')")
    set_number(page, "Guidance", 2)
    page.click("text=Share")
    other = open_page(page.url.removeprefix(site.url))
    other.click("text=Code")
    assert '"cfg_scale": 2' in other.inner_text("[data-testid=curl]")
    assert '"cfg_scale": 2' in other.inner_text("[data-testid=python]")
    other.get_by_label("Close", exact=True).click()
    other.select_option("[data-testid=policy]", "lossless")
    other.click("summary:has-text('Sampling')")
    assert other.get_by_label("Guidance", exact=True).is_disabled()
    generate(other)
    request, answer = sent_and_answered(other)
    assert request["diffusion"] == {"policy": "lossless"}
    assert "cfg_scale" not in answer["diffusion"]
    other.select_option("[data-testid=policy]", "confidence")
    assert other.get_by_label("Guidance", exact=True).input_value() == "2"


def test_a_server_without_guidance_and_overrides_offers_and_is_sent_neither(open_page, site):
    page = open_page()
    set_number(page, "Tokens", 8)
    page.click("summary:has-text('Sampling')")
    set_number(page, "Guidance", 2)
    page.click("[data-testid=overrides] summary")
    set_weight(page, "animal", 1)
    page.click("text=Share")
    page.route("**/v1/capabilities", lambda route: route.fulfill(json={"has_chat_template": False}))
    page.reload()
    page.wait_for_selector(".state-ready")
    page.click("summary:has-text('Sampling')")
    assert page.get_by_label("Guidance", exact=True).count() == 0
    assert page.locator("[data-testid=overrides]").count() == 0
    generate(page)
    request, _ = sent_and_answered(page)
    assert "diffusion" not in request and "steering" not in request


def set_weight(page: Any, query: str, weight: float) -> str:
    """Choose the first concept found in the open list of weights and set its weight; its name."""
    search = page.get_by_label("Find a concept whose weight to set")
    search.fill(query)
    page.locator("[data-testid=overrides] [role=option]").first.wait_for()
    search.press("Enter")
    name = page.locator("[data-testid=override] .slider-name").last.inner_text()
    page.get_by_label(f"Weight of {name}", exact=True).fill(str(weight))
    page.get_by_label(f"Weight of {name}", exact=True).press("Tab")
    return name


def test_set_weights_of_both_heads_change_the_text_and_leaving_them_gives_it_back(open_page):
    page = open_page()
    set_number(page, "Tokens", 24)
    generate(page)
    plain = prose(page)
    assert page.locator("[data-testid=override]").count() == 0
    add_slider(page, "animal", 0)
    page.locator("[data-testid=slider] summary").click()
    page.get_by_role("button", name="Set its weight").click()
    page.get_by_label("Weight of animal", exact=True).fill("-4")
    discovered = FIRST_DISCOVERED + 7
    assert set_weight(page, str(discovered), 2.5) == f"Discovered {discovered}"
    assert page.get_by_label(f"Weight of Discovered {discovered}, by slider").input_value() == "1"
    generate(page)
    overridden = prose(page)
    assert overridden != plain
    request, answer = sent_and_answered(page)
    animal = request["steering"]["overrides"][0]["concept"]
    weights = {animal: -4, discovered: 2.5}
    assert request["steering"] == {"overrides": [{"concept": c, "weight": w} for c, w in weights.items()]}
    applied = answer["steering"]["overrides"]
    assert {item["concept"]["id"]: item["weight"] for item in applied} == weights
    assert {item["head"] for item in applied} == {"known", "discovered"}
    page.select_option("[data-testid=override-mode]", "reference")
    generate(page)
    assert prose(page) != overridden
    assert sent_and_answered(page)[1]["steering"]["override_mode"] == "reference"
    page.get_by_label(f"Leave the weight of Discovered {discovered}").click()
    page.get_by_label("Leave the weight of animal").press("Enter")
    # The button is gone; a keyboard goes on from where weights are found.
    assert page.evaluate("document.activeElement.labels[0].textContent") == "Find a concept whose weight to set"
    generate(page)
    assert prose(page) == plain


def test_weights_stand_in_the_link_and_are_saved_with_a_preset(open_page, site):
    page = open_page()
    page.click("[data-testid=overrides] summary")
    set_weight(page, "music", 0.25)
    page.get_by_label("Name of a new preset").fill("quiet")
    page.get_by_role("button", name="Save", exact=True).click()
    page.locator(".presets option", has_text="quiet@1").wait_for(state="attached")
    page.click("text=Share")
    other = open_page(page.url.removeprefix(site.url))
    assert "(1 set)" in other.inner_text("[data-testid=overrides] summary")
    other.click("[data-testid=overrides] summary")
    other.get_by_label("Leave the weight of music").click()
    assert other.locator("[data-testid=override]").count() == 0
    other.get_by_label("Load a preset").select_option("quiet@1")
    assert other.get_by_label("Weight of music", exact=True).input_value() == "0.25"


def test_a_steered_chat_of_several_turns_with_a_model_that_has_a_template(open_page, serve, tmp_path: Path):
    checkpoint = describe(write_instruct_variant(tmp_path / "instruct"), MODEL_ID)
    with serve(checkpoint=checkpoint) as site:
        page = open_page(at=site)
        assert MODEL_ID in page.inner_text(".model")
        page.get_by_role("button", name="Chat", exact=True).click()
        set_number(page, "Tokens", 20)
        add_slider(page, "animal", 6)
        page.get_by_label("Show the unsteered text beside it").check()
        said, texts = ["what is large?", "and what is small?", "name a third"], []
        for words in said:
            page.fill("#prompt", words)
            page.click("[data-testid=generate]")
            page.select_option(".speed select", "live")
            wait_for_end(page, lanes=2)
            steered, plain = page.locator(".prose").all_inner_texts()
            assert steered != plain
            assert page.input_value("#prompt") == ""
            texts.append(steered)
        bodies = [json.loads(text.partition("\n")[2]) for text in raw_requests(page)]
        assert ["steering" in body for body in bodies] == [True, False]
        roles = ["user", "assistant", "user", "assistant", "user"]
        for body in bodies:
            assert [message["role"] for message in body["messages"]] == roles
            assert [message["content"] for message in body["messages"][::2]] == said
            assert [message["content"].strip() for message in body["messages"][1::2]] == [t.strip() for t in texts[:2]]
        assert page.locator(".turn").count() == 5
        # The prompt's tail on the canvas is what the template made of the turns.
        page.locator(".scrub").evaluate(SCRUB, "3")
        tail = page.locator(".lane").first.locator(".cell.is-prompt")
        tail.first.wait_for()
        assert "assistant:" in "".join(tail.all_inner_texts())[-20:]
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0


def raw_requests(page: Any) -> list[str]:
    """Every lane's request as the raw view shows it."""
    page.click("text=Raw")
    texts: list[str] = page.locator("[data-testid=raw-request]").all_inner_texts()
    page.get_by_label("Close", exact=True).click()
    return texts
