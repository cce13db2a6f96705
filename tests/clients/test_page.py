from __future__ import annotations

import json
import re

import pytest

from tests.clients.catalogue import CLIENTS, DRIVERS, Client
from tests.clients.page import EXAMPLE, section, table


def pinned(client: Client) -> str:
    """The version that a client's environment holds."""
    if client.requirements is None and not client.node:
        return "imitated"
    text = client.lock.read_text(encoding="utf-8")
    if client.node:
        return str(json.loads(text)["packages"]["node_modules/openai"]["version"])
    found = re.search(rf"^{re.escape(client.name)}==(\S+)", text, re.MULTILINE)
    assert found is not None, f"{client.lock.name} does not name {client.name}"
    return found[1]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_page_names_a_client_with_the_version_that_is_pinned(client: Client):
    assert table()[client.name].split(" | ")[1] == pinned(client)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_has_a_driver_and_if_it_is_installed_an_example(client: Client):
    assert (DRIVERS / client.driver).is_file()
    is_installed = client.node or client.requirements is not None
    assert bool(EXAMPLE.findall(section(client.name))) == is_installed
