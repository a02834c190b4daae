"""What became of known holders: sums by device, and the lines that are printed."""

from __future__ import annotations

import pytest

from memtriage.model.holders import (
    AllocatorFigures,
    Cleared,
    ClearStatus,
    HolderOutcome,
    HolderReading,
    SegmentPinning,
    by_device,
    total_by_device,
)

MIB = 1 << 20


def outcome(name: str, status: ClearStatus, **figures: object) -> HolderOutcome:
    return HolderOutcome(name=name, kind="workspace", status=status, **figures)  # type: ignore[arg-type]


@pytest.fixture
def result() -> Cleared:
    return Cleared(
        entries=[
            outcome(
                "a",
                "cleared",
                before={"cuda:0": 3 * MIB, "cpu": 0},
                freed={"cuda:0": 2 * MIB},
                pins=SegmentPinning(segments=1, nbytes=20 * MIB, releasable=18 * MIB),
            ),
            outcome("b", "skipped", reason="a graph is captured", before={"cpu": MIB}),
            outcome("c", "failed", reason="no such attribute"),
            outcome("d", "absent"),
            outcome(
                "e",
                "cleared",
                before={"cuda:0": MIB},
                freed={"cuda:0": MIB, "cpu": MIB},
                pins=SegmentPinning(segments=0, nbytes=0, releasable=0),
            ),
        ],
        before={
            "cuda:0": AllocatorFigures(allocated=9 * MIB, reserved=20 * MIB),
            "cuda:1": AllocatorFigures(allocated=MIB, reserved=2 * MIB),
        },
        after_clear={},
        after={"cuda:0": AllocatorFigures(allocated=6 * MIB, reserved=None)},
        collected=None,
        cache="emptied",
        seconds=0.1,
    )


def test_outcomes_by_status(result: Cleared) -> None:
    names = [[entry.name for entry in some] for some in (result.cleared, result.skipped, result.failed)]
    assert names == [["a", "e"], ["b"], ["c"]]


def test_what_was_freed_is_summed_by_device(result: Cleared) -> None:
    assert result.freed == {"cuda:0": 3 * MIB, "cpu": MIB}
    assert total_by_device([]) == {}
    assert HolderReading(name="a", nbytes={"cpu": 3, "cuda:0": 4}).total == 7


def test_a_line_for_each_entry_that_was_there_and_for_each_device(result: Cleared) -> None:
    assert result.lines() == [
        "a: cleared, held 3.0 MiB on cuda:0 in segments of 20.0 MiB (18.0 MiB releasable without it), "
        "freed 2.0 MiB on cuda:0",
        "b: skipped (a graph is captured), holds 1.0 MiB on cpu",
        "c: failed (no such attribute), holds nothing",
        "e: cleared, held 1.0 MiB on cuda:0, freed 1.0 MiB on cuda:0, 1.0 MiB on cpu",
        "cuda:0: allocated 9.0 MiB -> 6.0 MiB, reserved 20.0 MiB -> n/a; cache emptied",
        "cuda:1: allocated 1.0 MiB -> 1.0 MiB, reserved 2.0 MiB -> 2.0 MiB; cache emptied",
    ]


def test_devices_without_bytes_are_not_named() -> None:
    assert by_device({"cuda:0": MIB, "cpu": 0, "cuda:1": 2 * MIB}) == "1.0 MiB on cuda:0, 2.0 MiB on cuda:1"
    assert by_device({"cpu": 0}) == "nothing"
