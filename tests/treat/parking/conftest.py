"""CPU storages are parked here, also on machines where other tests use a GPU."""

from __future__ import annotations

import pytest

from memtriage.treat.parking import transfer


@pytest.fixture(autouse=True)
def a_process_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.cuda, "initialized", lambda: False)
