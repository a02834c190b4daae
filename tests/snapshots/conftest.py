"""Programs whose recordings are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memtriage.model.recording import DeviceRecording
from memtriage.snapshots.read import load_snapshot
from support.raw_snapshot import Program, save, snapshot_of


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Program], DeviceRecording]:
    def recorded(program: Program) -> DeviceRecording:
        (device,) = load_snapshot(save(snapshot_of(program), tmp_path / "one.pickle")).devices
        return device

    return recorded
