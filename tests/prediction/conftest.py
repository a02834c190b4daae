"""Traces look for what a script has made among all objects of the process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_looks(imported_stays_out: None) -> None:
    """See `imported_stays_out`."""
