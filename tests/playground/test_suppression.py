"""The suppress toggle in a real browser: what it sends, what that does to the text, and where there is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.playground.conftest import why_not
from tests.playground.driving import SCRUB, add_slider, generate, light, prose, set_number, wait_for_end

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(600),
]


def generate_and_catch(page: Any) -> tuple[dict[str, Any], str]:
    """The body of the request that the button sends, and the text that comes of it."""
    with page.expect_request("**/v1/completions") as caught:
        generate(page)
    return caught.value.post_data_json, prose(page)


def pressed(toggle: Any) -> str:
    return str(toggle.get_attribute("aria-pressed"))


def test_suppressing_a_lit_concept_changes_the_text_of_the_same_seed_and_letting_go_gives_it_back(open_page):
    page = open_page()
    assert page.get_by_label("Lock the seed").get_attribute("aria-pressed") == "true"
    set_number(page, "Tokens", 24)
    body, plain = generate_and_catch(page)
    assert "steering" not in body
    light(page, "animal")
    toggle = page.get_by_role("button", name="Suppress it")
    assert pressed(toggle) == "false"
    toggle.click()
    assert pressed(toggle) == "true"
    body, suppressed = generate_and_catch(page)
    (item,) = body["steering"]["suppress"]
    concept = page.request.get(f"{page.url}v1/concepts/{item['concept']}").json()
    assert concept["name"] == "animal" and item["strength"] > 0
    assert "interventions" not in body["steering"]
    assert suppressed != plain
    # A new generation put the light out, and a suppressed concept need not be among those of the text any more.
    row = page.get_by_role("button", name="Suppress animal", exact=True)
    assert pressed(row) == "true"
    row.click()
    assert row.count() == 0
    body, again = generate_and_catch(page)
    assert "steering" not in body
    assert again == plain


def test_the_toggle_of_a_lit_concept_and_the_one_beside_its_slider_are_one(open_page):
    page = open_page()
    set_number(page, "Tokens", 24)
    add_slider(page, "animal", 6)
    _, steered = generate_and_catch(page)
    light(page, "animal")
    lit = page.get_by_role("button", name="Suppress it")
    beside = page.get_by_role("button", name="Suppress animal", exact=True)
    assert (pressed(lit), pressed(beside)) == ("false", "false")
    beside.click()
    assert (pressed(lit), pressed(beside)) == ("true", "true")
    lit.click()
    assert (pressed(lit), pressed(beside)) == ("false", "false")
    beside.click()
    assert page.locator("[data-testid=suppression]").count() == 0, "one concept, one place in the list"
    page.get_by_label("Strength of suppressing animal", exact=True).fill("3")
    page.get_by_label("Strength of suppressing animal", exact=True).press("Tab")
    body, both = generate_and_catch(page)
    (intervention,) = body["steering"]["interventions"]
    (item,) = body["steering"]["suppress"]
    assert intervention["concepts"] == [item["concept"]] and item["strength"] == 3
    assert both != steered
    beside.click()
    body, again = generate_and_catch(page)
    assert "suppress" not in body["steering"]
    assert again == steered


def test_a_suppressed_concept_outlives_its_slider_and_can_be_let_go_by_the_keyboard(open_page):
    page = open_page()
    add_slider(page, "music", 0)
    page.get_by_role("button", name="Suppress music", exact=True).click()
    page.get_by_label("Remove music").click()
    assert page.locator("[data-testid=slider]").count() == 0
    toggle = page.get_by_role("button", name="Suppress music", exact=True)
    assert pressed(toggle) == "true"
    toggle.press("Space")
    assert page.locator("[data-testid=suppression]").count() == 0
    # The button is gone; a keyboard goes on from where concepts are found.
    assert page.evaluate("document.activeElement.labels[0].textContent") == "Find a concept to steer by"


def test_a_slider_that_leans_toward_a_suppressed_concept_is_said_to_work_against_it(open_page):
    page = open_page()
    add_slider(page, "music", 4)
    slider = page.locator("[data-testid=slider]")
    assert "suppress alone" not in slider.inner_text()
    page.get_by_role("button", name="Suppress music", exact=True).click()
    assert "suppress alone" in slider.inner_text()
    set_number(page, "Strength of music", -4)
    assert "suppress alone" not in slider.inner_text()


def test_a_discovered_concept_offers_neither_steering_nor_suppression_and_says_why(open_page):
    """Suppression was offered for every concept, and the request that it made was refused."""
    page = open_page()
    set_number(page, "Tokens", 24)
    generate(page)
    page.locator("[data-testid=concepts] .concept-name:has(.swatch-discovered)").first.click()
    card = page.locator("[data-testid=lit]")
    card.get_by_text("Discovered concepts can be neither steered by nor suppressed.").wait_for()
    offered = card.get_by_role("button")
    names = [name.strip() for name in offered.all_inner_texts()]
    assert "Set its weight" in names
    assert not {"Steer by it", "Suppress it"} & set(names)


def test_a_known_concept_that_the_server_does_not_steer_by_offers_neither_and_says_why(open_page):
    page = open_page()
    page.route(
        "**/v1/concepts/*",
        lambda route: route.fulfill(json={**route.fetch().json(), "is_steerable": False}),
    )
    set_number(page, "Tokens", 24)
    generate(page)
    light(page, "animal")
    card = page.locator("[data-testid=lit]")
    card.get_by_text("This concept is not steerable: it can be neither steered by nor suppressed.").wait_for()
    assert card.get_by_role("button", name="Suppress it").count() == 0
    assert card.get_by_role("button", name="Steer by it").count() == 0


def test_suppression_alone_is_compared_saved_and_linked(open_page, site):
    page = open_page()
    set_number(page, "Tokens", 24)
    add_slider(page, "animal", 0)
    page.get_by_role("button", name="Suppress animal", exact=True).click()
    page.get_by_label("Show the unsteered text beside it").check()
    page.click("[data-testid=generate]")
    page.select_option(".speed select", "live")
    wait_for_end(page, lanes=2)
    page.locator(".scrub").evaluate(SCRUB, "1000")
    suppressed, plain = page.locator(".prose").all_inner_texts()
    assert suppressed != plain
    with page.expect_request("**/v1/steering/presets") as caught:
        page.get_by_label("Name of a new preset").fill("no animals")
        page.get_by_role("button", name="Save", exact=True).click()
    sent = json.loads(caught.value.post_data)
    assert [set(item) for item in sent["steering"]["suppress"]] == [{"concept", "strength"}]
    page.locator(".presets option", has_text="no-animals@1").wait_for(state="attached")
    page.click("text=Share")
    other = open_page(page.url.removeprefix(site.url))
    toggle = other.get_by_role("button", name="Suppress animal", exact=True)
    assert pressed(toggle) == "true"
    toggle.click()
    other.get_by_label("Remove animal").click()
    other.get_by_label("Load a preset").select_option("no-animals@1")
    assert pressed(other.get_by_role("button", name="Suppress animal", exact=True)) == "true"
