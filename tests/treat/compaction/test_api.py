"""`memtriage.compact` where there is no CUDA, and the words of its result."""

from __future__ import annotations

import pytest
import torch

import memtriage
from memtriage.treat.compaction.result import Compaction, DeviceCompaction, NotMoved
from memtriage.treat.device.protocol import Use

MIB = 1 << 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
@pytest.mark.parametrize("dry_run", [False, True])
def test_without_cuda_the_result_is_empty_and_says_why(dry_run: bool) -> None:
    done = memtriage.compact(dry_run=dry_run)
    assert done.devices == ()
    assert done.dry_run is dry_run
    assert done.moved == 0
    assert done.before == done.predicted == Use(0, 0)
    assert "CUDA is not in use" in str(done)


def compaction(after: Use | None) -> DeviceCompaction:
    return DeviceCompaction(
        device="cuda:1",
        before=Use(100 * MIB, 900 * MIB),
        predicted=Use(100 * MIB, 120 * MIB),
        after=after,
        moved=80 * MIB,
        storages=7,
        refused=(NotMoved("held by C++ only", 2 * MIB, 1, 18 * MIB),),
        seconds=0.0123,
    )


def test_the_text_tells_what_was_done_and_what_was_not() -> None:
    text = str(Compaction((compaction(Use(100 * MIB, 122 * MIB)),)))
    assert text.splitlines() == [
        "cuda:1: moved 80.0 MiB in 7 storages, reserved 900.0 MiB -> 122.0 MiB "
        "(allocated 100.0 MiB), 12.3 ms",
        "  not moved: 2.0 MiB in 1 blocks, stranding 18.0 MiB: held by C++ only",
    ]


def test_the_text_of_a_dry_run_foretells() -> None:
    text = str(Compaction((compaction(None),), dry_run=True))
    assert "would move 80.0 MiB" in text
    assert "-> 120.0 MiB" in text


def test_devices_are_added_up() -> None:
    done = Compaction((compaction(Use(1, 2)), compaction(Use(10, 20))))
    assert done.after == Use(11, 22)
    assert done.before == Use(200 * MIB, 1800 * MIB)
    assert done.moved == 160 * MIB
    assert len(done.refused) == 2
    assert Compaction((compaction(None),), dry_run=True).after is None
