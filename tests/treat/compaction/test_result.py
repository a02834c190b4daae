"""The words and the sums of what compaction gives back."""

from __future__ import annotations

from typing import Any

from memtriage.treat.compaction.result import Compaction, DeviceCompaction, NotMoved
from memtriage.treat.device.protocol import Use

MIB = 1 << 20


def compaction(after: Use | None, **options: Any) -> DeviceCompaction:
    return DeviceCompaction(
        device="cuda:1",
        before=Use(100 * MIB, 900 * MIB),
        predicted=Use(100 * MIB, 120 * MIB),
        after=after,
        moved=80 * MIB,
        storages=7,
        refused=(NotMoved("held by C++ only", 2 * MIB, 1, 18 * MIB),),
        seconds=0.0123,
        **options,
    )


def test_the_text_tells_what_was_done_and_what_was_not() -> None:
    done = compaction(Use(100 * MIB, 122 * MIB), stopped="memory ran out")
    assert str(Compaction((done,), notes=("cuda:2 is not in use",))).splitlines() == [
        "cuda:1: moved 80.0 MiB in 7 storages, reserved 900.0 MiB -> 122.0 MiB "
        "(allocated 100.0 MiB), 12.3 ms",
        "  not moved: 2.0 MiB in 1 blocks, stranding 18.0 MiB: held by C++ only",
        "  stopped: memory ran out",
        "cuda:2 is not in use",
    ]


def test_the_text_of_a_dry_run_has_what_it_would_come_to() -> None:
    assert str(Compaction((compaction(None),), dry_run=True)).splitlines() == [
        "cuda:1: would move 80.0 MiB in 7 storages, reserved 900.0 MiB -> 120.0 MiB "
        "(allocated 100.0 MiB), 12.3 ms",
        "  not moved: 2.0 MiB in 1 blocks, stranding 18.0 MiB: held by C++ only",
    ]


def test_devices_are_added_up() -> None:
    done = Compaction((compaction(Use(1, 2)), compaction(Use(10, 20))))
    assert (done.after, done.before, done.predicted) == (
        Use(11, 22), Use(200 * MIB, 1800 * MIB), Use(200 * MIB, 240 * MIB),
    )  # fmt: skip
    assert (done.moved, len(done.refused), done.seconds) == (160 * MIB, 2, 0.0246)
    assert Compaction((compaction(None),), dry_run=True).after is None
    assert Compaction((compaction(Use(1, 2)),), dry_run=True).after is None


def test_of_what_was_not_looked_at_nothing_is_told() -> None:
    nothing = Compaction(())
    assert (nothing.dry_run, nothing.after, nothing.moved, str(nothing)) == (False, Use(0, 0), 0, "")
    untouched = DeviceCompaction("cuda:0", Use(1, 2), Use(1, 2), None)
    assert (untouched.moved, untouched.storages, untouched.through_host, untouched.seconds) == (0, 0, 0, 0)
