"""CPU storages are parked here, also on machines where other tests use a GPU."""

from __future__ import annotations

import pytest

from memtriage.treat.park import parking


@pytest.fixture(autouse=True)
def a_process_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking.cuda, "initialised", lambda: False)
