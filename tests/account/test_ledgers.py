"""The ledgers of this process: every row sums to the measured total."""

from __future__ import annotations

import pytest
import torch

from memtriage.account import ledgers as ledgers_module
from memtriage.account.census import take_census
from memtriage.account.host_reading import read_host
from memtriage.account.ledgers import take_ledgers
from memtriage.model.blocks import Block, DriverUse, Segment
from memtriage.model.census import StorageRecord
from support.paths import named

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
        StorageRecord(
            device=device, address=4096, nbytes=2 * MiB - 100, owner="parameter", path=named("train.w")
        )
        for device in ("cuda:1", "cuda:0")
    ]
    gpu, host = take_ledgers(storages, {1: 3 * MiB})
    assert (gpu.device, gpu.total, host.device) == ("cuda:1", 10 * MiB, "host")
    assert sum(row.bytes for row in gpu.rows) == gpu.total
    assert [row.bytes for row in gpu.rows if row.owner == "parameter"] == [2 * MiB - 100]


def test_without_a_census_tensors_are_not_said_to_be_none() -> None:
    (ledger,) = take_ledgers(None)
    in_use = next(row for row in ledger.rows if row.row == "malloc in use")
    assert "no census" in str(in_use.detail)


def test_pythons_objects_have_a_row_of_their_own() -> None:
    (ledger,) = take_ledgers(take_census().storages)
    python = next(row for row in ledger.rows if row.row == "Python objects")
    assert python.bytes > 20 * MiB


def test_bytes_for_each_parameter() -> None:
    model = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    census = take_census()
    ledgers = take_ledgers(census.storages, parameters=census.parameters)
    parameters = ledgers[0].parameters
    assert parameters is not None and parameters >= model.weight.numel()
    row = next(row for row in ledgers[0].rows if row.owner == "parameter")
    assert ledgers[0].per_parameter(row) == row.bytes / parameters
    assert take_ledgers(None)[0].per_parameter(row) is None


def test_a_census_counts_elements_and_not_bytes() -> None:
    before = take_census().parameters
    kept = torch.nn.ParameterList(
        [
            torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64)),
            torch.nn.Parameter(torch.zeros(500).half()),
        ]
    )
    assert take_census().parameters - before == sum(tensor.numel() for tensor in kept)


def test_a_reading_before_the_census_leaves_the_census_out() -> None:
    reading = read_host()
    assert reading is not None
    storages = take_census().storages
    (ledger,) = take_ledgers(storages, on_host=reading)
    assert ledger.total == reading.classes.total
    assert sum(row.bytes for row in ledger.rows) == ledger.total


def test_rows_of_a_large_model_have_bytes_per_parameter() -> None:
    kept = torch.nn.Parameter(torch.ones(2_000_000))
    census = take_census()
    (ledger,) = take_ledgers(census.storages, parameters=2_000_000)
    row = next(row for row in ledger.rows if row.owner == "variable" and row.bytes >= kept.nbytes)
    assert str(row.detail).startswith(f"{row.bytes / 2_000_000:.2f} B/param; ")
    (least,) = take_ledgers(census.storages, parameters=1_000_000)
    assert any("B/param" in str(row.detail) for row in least.rows)


@pytest.mark.parametrize("parameters", [None, 0, 999_999, 10**15])
def test_where_they_would_mean_nothing_rows_have_none(parameters: int | None) -> None:
    """Of a small model, and of what is less than a hundredth of a byte for each."""
    (ledger,) = take_ledgers(take_census().storages, parameters=parameters)
    assert ledger.rows and not any("B/param" in str(row.detail) for row in ledger.rows)
