"""Watches without what takes its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memtriage.process import active
from support import censuses


@pytest.fixture
def no_census(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where no question is one of a census: one of all that pytest has in memory takes its time."""
    censuses.leave_out(monkeypatch)
    yield
    assert active.session is None
