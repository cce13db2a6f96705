"""For those who want no motion, who see no colours, and who have no mouse: the page in a real browser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.playground.conftest import why_not
from tests.playground.driving import add_slider, generate, light, prose, set_number, wait_for_end

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(600),
]

LANDING = """() => {
  const cell = document.querySelector(".cell.is-landed");
  if (cell === null) return null;
  const styles = [cell, document.querySelector(".toast")].map((element) => getComputedStyle(element));
  return {
    animations: styles.map((style) => style.animationName),
    transitions: styles.map((style) => style.transitionDuration),
    numRunning: document.getAnimations().length,
  };
}"""
"""What moves at the moment at which a word has landed."""

HEADS = ("known", "discovered")
PARTS = (*HEADS, "epsilon")


@pytest.mark.parametrize("wish", ["reduce", "no-preference"])
def test_nothing_moves_for_those_who_ask_for_reduced_motion(open_page, wish):
    page = open_page(reduced_motion=wish)
    set_number(page, "Tokens", 24)
    page.click("[data-testid=generate]")
    moving = page.wait_for_function(LANDING).json_value()
    if wish == "reduce":
        assert moving == {"animations": ["none", "none"], "transitions": ["0s", "0s"], "numRunning": 0}
    else:
        assert moving["animations"] == ["land", "none"]
        assert moving["transitions"] == ["0s", "0.2s"]
        assert moving["numRunning"] > 0


def open_everything(page: Any) -> None:
    """Generate, and bring every kind of mark and bar on show: opened word, lit concept, chunks, sliders, weights."""
    set_number(page, "Tokens", 40)
    add_slider(page, "plant", 4)
    add_slider(page, "music", 0)
    page.get_by_role("button", name="Suppress music", exact=True).click()
    page.get_by_label("Remove music").click()
    generate(page)
    page.locator(".word").nth(2).click()
    page.click("[data-testid=chunks] summary")
    light(page, "animal")
    page.get_by_role("button", name="Set its weight").click()
    search_weights(page, "107")
    page.keyboard.press("Enter")
    page.locator("[data-testid=override]").nth(1).wait_for()


def search_weights(page: Any, query: str) -> Any:
    """The options found for a query in the list of weights."""
    page.get_by_label("Find a concept whose weight to set").fill(query)
    options = page.locator("[data-testid=overrides] [role=option]")
    options.first.wait_for()
    return options


UNLABELLED = """(parts) => parts.flatMap((part) =>
  [...document.querySelectorAll(`main .swatch-${part}, main .bar-${part}`)]
    .filter((mark) => {
      const owner = mark.closest(".concept-name, li, h2, .sum-row, .slider, [role=option]");
      return !owner || !owner.textContent.toLowerCase().includes(part);
    })
    .map((mark) => `${part}: ${mark.parentElement.outerHTML}`))"""
"""Marks and bars without the name of their part in the same line."""

PATTERNS = """(parts) => ["swatch", "bar"].map((kind) => parts.map((part) => {
  const { backgroundImage } = getComputedStyle(document.querySelector(`main .${kind}-${part}`));
  return backgroundImage.split("(")[0];
}))"""


def test_every_mark_and_bar_has_a_pattern_and_a_label_beside_its_colour(open_page):
    page = open_page()
    open_everything(page)
    for part in PARTS:
        assert page.locator(f"main .swatch-{part}").count() > 1, part
        assert page.locator(f"main .bar-{part}").count() > 1, part
    solid_hatched_dotted = ["none", "repeating-linear-gradient", "radial-gradient"]
    assert page.evaluate(PATTERNS, list(PARTS)) == [solid_hatched_dotted, solid_hatched_dotted]
    assert page.evaluate(UNLABELLED, list(PARTS)) == []
    search_weights(page, "a")
    assert page.evaluate(UNLABELLED, list(PARTS)) == []
    legend = page.get_by_role("list", name="Colours and patterns").get_by_role("listitem")
    assert [item.strip() for item in legend.all_inner_texts()] == list(PARTS)


def test_what_a_mark_says_in_colour_is_in_the_accessible_name(open_page):
    page = open_page()
    open_everything(page)
    for head in HEADS:
        marked = page.locator(f".concept-name:has(.swatch-{head})").count()
        assert marked > 0
        named = page.locator("main .concept-name").and_(page.get_by_role("button", name=re.compile(rf"^{head} \S")))
        assert named.count() == marked, head
        weights = page.get_by_role("group", name=re.compile(rf"^Set the weight of the {head} concept \S"))
        assert weights.count() == 1, head
    assert page.get_by_role("group", name="Steer by the known concept plant").count() == 1
    assert page.get_by_role("group", name="Suppressed: the known concept music").count() == 1
    number = r"[+\u2212]?\d+\.\d+"
    parts = ", ".join(f"{part} {number}" for part in PARTS)
    assert page.get_by_role("figure", name=re.compile(f"^{parts}; together the logit {number}$")).count() == 1
    for query, head in (("animal", "known"), ("108", "discovered")):
        search_weights(page, query)
        option = page.get_by_role("option", name=re.compile(rf"^{head} \S"))
        option.first.wait_for()
    assert page.get_by_role("heading", name=re.compile(r"^known animal$")).count() == 1


def test_a_lit_word_says_by_line_and_by_name_whether_the_concept_was_for_or_against_it(open_page):
    page = open_page()
    set_number(page, "Tokens", 40)
    generate(page)
    seen = set()
    for concept in page.locator("[data-testid=concepts] .concept-name").all():
        concept.click()
        for side, line, sign in (("for", "solid", r"\+"), ("against", "wavy", r"\u2212")):
            words = page.locator(f".word.lit-{side}")
            if words.count() == 0:
                continue
            seen.add(side)
            styles = words.evaluate_all("(all) => all.map((word) => getComputedStyle(word).textDecorationStyle)")
            assert set(styles) == {line}
            named = words.and_(page.get_by_role("button", name=re.compile(rf", {sign}\d+\.\d+ from ")))
            assert named.count() == words.count()
    assert seen == {"for", "against"}


def tab_to(page: Any, target: Any, *, back: bool = False, most: int = 120) -> None:
    """Press Tab until the target has the focus. Each stop on the way must show that it is one."""
    key = "Shift+Tab" if back else "Tab"
    for _ in range(most):
        page.keyboard.press(key)
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", page.evaluate("document.activeElement.outerHTML")
        if target.evaluate_all("(found) => found.includes(document.activeElement)"):
            return
    raise AssertionError(f"{key}, pressed {most} times, does not get to {target}")


def focused(page: Any) -> str:
    """The accessible name that the focused element gives itself, or its text."""
    name = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()"
    return str(page.evaluate(name))


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_a_steered_run_is_asked_for_read_and_explained_by_keys_alone(open_page):
    page = open_page()
    tab_to(page, page.get_by_role("combobox", name="Find a concept to steer by"))
    page.keyboard.type("animal")
    # Typing takes time, and what is found for its beginning may be another concept.
    page.locator("[role=option][aria-selected=true] bdi", has_text=re.compile("^animal$")).wait_for()
    press(page, "Enter")
    page.locator("[data-testid=slider]").wait_for()
    tab_to(page, page.get_by_role("slider", name="Strength of animal, by slider"))
    press(page, *["ArrowRight"] * 4)
    assert page.get_by_label("Strength of animal", exact=True).input_value() == "6"
    tab_to(page, page.get_by_role("spinbutton", name="Tokens", exact=True), back=True)
    press(page, "Control+A", "2", "4")
    tab_to(page, page.get_by_role("button", name="Generate", exact=True))
    with page.expect_request("**/v1/completions") as caught:
        press(page, "Enter")
    body = caught.value.post_data_json
    assert body["max_tokens"] == 24 and body["steering"]["interventions"][0]["strength"] == 6
    tab_to(page, page.get_by_label("Speed"))
    press(page, "End")
    wait_for_end(page)
    assert len(prose(page)) > 20

    tab_to(page, page.locator(".word"))
    press(page, "ArrowRight", "ArrowRight")
    word = focused(page)
    panel = page.locator("[data-testid=token]")
    assert panel.locator("h2 .sr-only").inner_text() == word.strip()
    tab_to(page, panel.locator(".concept-name"))
    concept = page.evaluate("document.activeElement.querySelector('.concept-text bdi').textContent")
    press(page, "Enter")
    lit = page.locator("[data-testid=lit]")
    lit.get_by_role("heading", name=concept).first.wait_for()
    tab_to(page, lit.get_by_role("button", name="Put the light out"))
    press(page, "Enter")
    assert lit.count() == 0
    assert page.evaluate("document.activeElement.querySelector('.concept-text bdi')?.textContent") == concept
    tab_to(page, panel.get_by_role("button", name="Close the opened word"), back=True)
    press(page, "Enter")
    assert panel.count() == 0
    assert focused(page) == word, "the button is gone; the word that it closed has the focus"


def test_a_dialog_is_opened_read_and_closed_by_keys_alone(open_page):
    page = open_page()
    tab_to(page, page.get_by_role("button", name="Code", exact=True))
    press(page, "Enter")
    dialog = page.get_by_role("dialog", name="This request as code")
    dialog.wait_for()
    for _ in range(8):
        press(page, "Tab")
        inside = "document.activeElement === document.body || !!document.activeElement.closest('dialog')"
        assert page.evaluate(inside), focused(page)
    press(page, "Escape")
    assert dialog.count() == 0
    assert focused(page) == "Code"
