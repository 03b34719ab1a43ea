"""A part that a machine lacks: the test says so and skips; where everything must be there, it fails instead."""

from __future__ import annotations

import os
import shutil

import pytest


def need(present: bool, what: str) -> None:
    """Skip, with the reason, unless `present`; fail when RACKSIDE_REQUIRE_PARTS is set, as it is in CI."""
    if not present:
        if os.environ.get("RACKSIDE_REQUIRE_PARTS"):
            pytest.fail(f"{what} is missing, and RACKSIDE_REQUIRE_PARTS says that it must be there")
        pytest.skip(f"{what} is not installed")


def program(*names: str) -> str:
    """The path of the first program that is there, also where a login's PATH does not reach."""
    places = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin"
    found = next((path for name in names if (path := shutil.which(name, path=places))), None)
    need(found is not None, names[0])
    assert found is not None
    return found
