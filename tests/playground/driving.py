"""What tests do on the page, in one word each. `page` is playwright's."""

from __future__ import annotations

from typing import Any

SCRUB = "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', {bubbles: true})); }"
"""Puts a range where it is told."""


def generate(page: Any, *, speed: str = "live") -> None:
    """Press the button and wait until all of the answer is on show."""
    page.click("[data-testid=generate]")
    page.select_option(".speed select", speed)
    wait_for_end(page)


def wait_for_end(page: Any, lanes: int = 1) -> None:
    page.locator("[data-testid=facts]").nth(lanes - 1).wait_for()


def prose(page: Any) -> str:
    return page.inner_text(".prose")


def set_number(page: Any, label: str, value: int) -> None:
    page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_label(label, exact=True).press("Tab")


def add_slider(page: Any, name: str, strength: int) -> None:
    page.fill("[role=combobox]", name)
    page.wait_for_selector("[role=option]")
    page.press("[role=combobox]", "Enter")
    set_number(page, f"Strength of {name}", strength)


def light(page: Any, name: str) -> None:
    """Light a concept of the list and wait for what can be done with it."""
    page.locator("[data-testid=concepts] .concept-name", has_text=name).first.click()
    page.wait_for_selector("[data-testid=lit] h3:has-text('Nearest')")
