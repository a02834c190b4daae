"""CPU storages are parked here, also on machines where other tests use a GPU; none stays parked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import memtriage
from memtriage.treat.parking import transfer
from memtriage.treat.parking.api import is_parked


@pytest.fixture(autouse=True)
def a_process_without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transfer.cuda, "initialized", lambda: False)
    yield
    if is_parked():
        memtriage.unpark()
    memtriage.release_parking()
