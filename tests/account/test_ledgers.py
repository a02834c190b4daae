"""The ledgers of this process: every row sums to the measured total."""

from __future__ import annotations

import pytest
import torch

from memtriage.account import ledgers as ledgers_module
from memtriage.account.census import take_census
from memtriage.account.ledgers import take_ledgers
from memtriage.model.blocks import Block, DriverUse, Segment
from memtriage.model.census import StorageRecord

MiB = 1024**2


def test_host_ledger_closes_with_and_without_a_census() -> None:
    kept = torch.ones(MiB)
    storages = take_census().storages
    for given in (storages, None):
        (ledger,) = take_ledgers(given)
        assert ledger.device == "host"
        assert sum(row.bytes for row in ledger.rows) == ledger.total > kept.nbytes
        assert all(row.bytes >= 0 for row in ledger.rows if row.row != "unexplained")


def test_tensors_of_the_census_are_rows_of_the_host() -> None:
    kept = torch.ones(4 * MiB)
    (with_owners,) = take_ledgers(take_census().storages)
    (without,) = take_ledgers(None)
    named = sum(row.bytes for row in with_owners.rows if row.owner is not None)
    assert named >= kept.nbytes
    assert sum(row.bytes for row in without.rows if row.owner is not None) <= named - kept.nbytes


def test_a_device_gets_its_own_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(address=4096, size=2 * MiB, requested=2 * MiB - 100, state="active")
    segment = Segment(
        device=1, address=4096, size=2 * MiB, stream=0, pool=(0, 0), expandable=False, blocks=(block,)
    )
    use = DriverUse(total=100 * MiB, used=10 * MiB, processes=(), own=None, source="test")
    monkeypatch.setattr(ledgers_module.cuda, "devices", lambda: [0, 1])
    monkeypatch.setattr(ledgers_module.cuda, "segments", lambda device, root: [segment])
    monkeypatch.setattr(ledgers_module.driver, "driver_use", lambda device: use if device == 1 else None)
    storages = [
        StorageRecord(device=device, address=4096, nbytes=2 * MiB - 100, owner="parameter", holder="train.w")
        for device in ("cuda:1", "cuda:0")
    ]
    gpu, host = take_ledgers(storages, {1: 3 * MiB})
    assert (gpu.device, gpu.total, host.device) == ("cuda:1", 10 * MiB, "host")
    assert sum(row.bytes for row in gpu.rows) == gpu.total
    assert [row.bytes for row in gpu.rows if row.owner == "parameter"] == [2 * MiB - 100]
