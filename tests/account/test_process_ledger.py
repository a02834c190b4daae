"""The GPU ledger of another process: its rows sum to what the driver counts."""

from __future__ import annotations

from memtriage.account.process_ledger import gpu_rows
from memtriage.model.blocks import DeviceCounters

_COUNTERS = DeviceCounters(allocated=900, requested=800, active=1000, reserved=2000, inactive_split=300)


def test_the_rows_have_the_names_of_a_ledger_inside() -> None:
    rows = gpu_rows({"parameter": 100, "gradient": 500}, _COUNTERS, 2500)
    assert [(row.row, row.owner, row.bytes) for row in rows] == [
        ("requested", "gradient", 500),
        ("requested", "parameter", 100),
        ("requested", "c++ only", 200),
        ("rounding", None, 100),
        ("awaiting stream events", None, 100),
        ("releasable", None, 700),
        ("stranded", None, 300),
        ("outside the allocator", None, 500),
    ]
    assert sum(row.bytes for row in rows) == 2500


def test_tensors_that_are_freed_meanwhile_close_the_sum() -> None:
    rows = gpu_rows({"variable": 1000}, _COUNTERS, 2500)
    assert {row.row: row.bytes for row in rows}["unexplained"] == -200
    assert sum(row.bytes for row in rows) == 2500


def test_what_is_not_known_is_one_row() -> None:
    rows = gpu_rows({"variable": 1000}, None, 2500)
    assert [(row.row, row.bytes) for row in rows] == [("requested", 1000), ("rest of the process", 1500)]
    assert [row.row for row in gpu_rows({"variable": 1000}, None, None)] == ["requested"]
    assert sum(row.bytes for row in gpu_rows({}, _COUNTERS, None)) == 2000


def test_counters_that_are_missing_count_as_nothing() -> None:
    empty = DeviceCounters(allocated=None, requested=0, active=None, reserved=0, inactive_split=None)
    assert gpu_rows({}, empty, None) == gpu_rows({}, None, None) == []
    partial = DeviceCounters(allocated=900, requested=None, active=1000, reserved=2000, inactive_split=0)
    assert [row.row for row in gpu_rows({"variable": 10}, partial, 15)] == [
        "requested",
        "rest of the process",
    ]


def test_more_tensors_than_the_driver_counts_leave_no_rest() -> None:
    assert [row.bytes for row in gpu_rows({"variable": 1000}, None, 900)] == [1000]
