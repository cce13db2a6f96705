from __future__ import annotations

from copy import deepcopy

import pytest

from tests.deploy.manifests import OVERLAYS, build


@pytest.fixture(scope="package")
def built():
    return {name: build(f"overlays/{name}") for name in OVERLAYS} | {"base": build("base")}


@pytest.fixture
def prod(built):
    """A copy of what the production overlay builds, to spoil."""
    return deepcopy(built["prod"])
