"""`python deploy/requirements.py [extra ...]`: what pyproject.toml asks for, one a line.

Lets an image install the dependencies before it has the source, in a layer that a change of ours leaves as it is.
"""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """The project's dependencies and those of some extras. Raises KeyError for an extra that is not there."""
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    optional = project["optional-dependencies"]
    return project["dependencies"] + [requirement for extra in extras for requirement in optional[extra]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
