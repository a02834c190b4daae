"""Watches without censuses: one would walk all that pytest holds, which takes seconds."""

from __future__ import annotations

import pytest

from memtriage.diagnose.leaks import CensusPoint
from memtriage.model.census import Census
from memtriage.session.investigation import Investigator


def leave_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on censuses find nothing. Returns the positions at which one is asked for."""
    asked: list[int] = []
    nothing = Census(storages=[], groups=[], nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0)

    def census(self: Investigator, position: int, also: object = None, frames: object = None) -> CensusPoint:
        asked.append(position)
        return CensusPoint(position, nothing)

    monkeypatch.setattr(Investigator, "census", census)
    return asked
