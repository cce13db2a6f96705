"""The page on a server that asks for an API key: what it sends, offers and shows with one, and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.api_keys import ApiKeys
from serve_app.config import ApiKeySettings
from tests.playground.conftest import PATIENCE_MS, ServerFactory, Site, why_not
from tests.playground.driving import generate, set_number

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(600),
]

KEY = "open-sesame"


@pytest.fixture(scope="module")
def locked_site(serve: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that asks for `KEY`."""
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    with serve(api_keys=ApiKeys(ApiKeySettings(file=str(keys)))) as site:
        yield site


@pytest.fixture
def locked_page(locked_site: Site, browser: Any) -> Iterator[Any]:
    """The page before anybody gave it the key."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(locked_site.url)
    page.wait_for_selector(".state-locked")
    yield page
    page.close()


def unlock(page: Any) -> None:
    page.fill("#first-key", KEY)
    page.press("#first-key", "Enter")
    page.wait_for_selector(".state-ready")


def test_a_server_that_asks_for_a_key_gets_it(locked_page):
    unlock(locked_page)
    set_number(locked_page, "Tokens", 8)
    generate(locked_page)
    assert "8 tokens" in locked_page.inner_text("[data-testid=facts]")


def test_code_takes_the_key_from_the_environment_and_never_holds_it(locked_page, locked_site):
    """The code left the key away, so that what it asked for was refused."""
    unlock(locked_page)
    locked_page.click("text=Code")
    curl, python = (locked_page.inner_text(f"[data-testid={name}]") for name in ("curl", "python"))
    assert '-H "authorization: Bearer $GLASSBLOCK_API_KEY"' in curl
    assert 'api_key=os.environ["GLASSBLOCK_API_KEY"]' in python
    compile(python, "snippet", "exec")
    assert KEY not in locked_page.content()


def test_code_for_a_server_without_keys_names_none(open_page):
    page = open_page()
    page.click("text=Code")
    assert "authorization" not in page.inner_text("[data-testid=curl]")
    assert "environ" not in page.inner_text("[data-testid=python]")


def test_the_footer_s_links_lead_somewhere_on_a_server_without_keys(open_page, site):
    page = open_page()
    links = page.locator("footer a").evaluate_all("(links) => links.map((link) => link.href)")
    assert links == [f"{site.url}/docs", f"{site.url}/v1/models"]
    assert [page.request.get(link).status for link in links] == [200, 200]


def test_with_a_key_the_footer_fetches_the_models_and_says_what_it_cannot_open(locked_page, locked_site):
    """The links were answered 401: a browser that follows one sends no key."""
    address = f"{locked_site.url}/v1/models"
    assert locked_page.request.get(address).status == 401
    unlock(locked_page)
    assert locked_page.locator("footer").get_by_role("link").count() == 0
    assert "docs, asks for the API key" in locked_page.inner_text("footer")
    locked_page.get_by_role("button", name="v1/models").click()
    models = json.loads(locked_page.locator("[data-testid=models]").inner_text())
    assert models == locked_page.request.get(address, headers={"authorization": f"Bearer {KEY}"}).json()


def test_before_the_key_is_given_the_footer_says_that_one_is_asked_for(locked_page):
    footer = locked_page.locator("footer")
    assert footer.get_by_role("link").count() == 0 and footer.get_by_role("button").count() == 0
    assert "ask for the API key" in footer.inner_text()


def test_what_the_footer_cannot_fetch_is_told_in_words(locked_page):
    unlock(locked_page)
    locked_page.route("**/v1/models", lambda route: route.abort("connectionrefused"))
    locked_page.get_by_role("button", name="v1/models").click()
    assert "does not answer" in locked_page.get_by_role("dialog").get_by_role("alert").inner_text()
