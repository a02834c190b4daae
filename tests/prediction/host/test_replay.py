"""From a timeline of the host to its peak by class."""

import pytest

from memtriage.prediction.host.memory import (
    FILES,
    LOADED,
    PINNED,
    TENSORS,
    HostMemory,
    Libraries,
    MemoryPlace,
)
from memtriage.prediction.host.replay import (
    HostReplay,
    PinnedCache,
    highest,
    host_course,
    stretches,
    with_peak,
)

MIB = 1 << 20
MAPPED, LOCKED = MemoryPlace.MAPPING, MemoryPlace.PINNED


def test_the_peak_of_each_part_between_collectives():
    memory = HostMemory()
    memory.trace.libraries = Libraries(own=100, shared=20, launcher=3)
    one = memory.allocate(1000, TENSORS, MAPPED)
    two = memory.allocate(5000, LOADED, MAPPED)
    memory.free(two)
    memory.meet()
    memory.allocate(300, FILES, MAPPED, "/net.pt")
    memory.meet()
    memory.free(one)
    three = memory.allocate(900, LOADED, MAPPED)
    memory.free(three)
    memory.trace.owners[three] = "parameter"
    parts = stretches(memory.trace)
    assert [list(part.items()) for part in parts] == [
        [("loaded", 5000), ("other tensors", 1000), ("libraries", 120), ("peak", 6120)],
        [("other tensors", 1000), ("mapped files", 300), ("libraries", 120), ("peak", 1420)],
        [("other tensors", 1000), ("mapped files", 300), ("libraries", 120), ("peak", 1420)],
    ]
    course = host_course(memory.trace)
    assert (course.stretches, course.shared, course.launcher) == (parts, 20, 3)
    assert highest(parts) is parts[0]


def test_freed_memory_that_malloc_keeps_is_resident():
    memory = HostMemory()
    below = [memory.allocate(100_000, LOADED) for _ in range(20)]
    memory.allocate(100_000, TENSORS)
    for block in below:
        memory.free(block)
    replay = HostReplay(memory.trace)
    resident = list(replay.advance(21))
    assert len(resident) == 21 and resident == sorted(resident)
    assert replay.by_class == {"loaded": 2_000_000, "other tensors": 100_000}
    assert list(replay.advance(len(memory.trace.events))) == []
    assert replay.by_class == {"loaded": 0, "other tensors": 100_000}
    assert 2_000_000 < replay.retained < 2_020_000 and replay.resident == 100_000 + replay.retained
    assert replay.classes() == {
        "malloc retained": replay.retained,
        "other tensors": 100_000,
        "libraries": 0,
        "peak": replay.resident,
    }


def test_a_small_heap_is_kept_when_all_of_it_is_free():
    memory = HostMemory()
    first, second = memory.allocate(100_000), memory.allocate(100_000)
    memory.free(second)
    memory.free(first)
    replay = HostReplay(memory.trace)
    list(replay.advance(4))
    # Each has a header, its alignment, and the objects that describe a tensor, in a chunk of their own.
    assert replay.retained == 2 * (100_000 + 512 + 2 * 80)


def test_parts_of_files_are_counted_by_file():
    memory = HostMemory()
    blocks = [memory.allocate(size, FILES, MAPPED, name) for size, name in ((1, "/a"), (2, "/b"), (4, "/a"))]
    memory.free(blocks[0])
    memory.allocate(9, TENSORS, MAPPED)
    replay = HostReplay(memory.trace)
    list(replay.advance(5))
    assert replay.files == {"/a": 4, "/b": 2}
    assert replay.retained == 0


def test_pinned_memory_is_rounded_and_kept():
    memory = HostMemory()
    first = memory.allocate(3 * MIB, PINNED, LOCKED)
    memory.allocate(MIB, TENSORS, MAPPED)
    memory.free(first)
    memory.allocate(MIB, TENSORS, MAPPED)
    memory.allocate(4 * MIB, PINNED, LOCKED)
    replay = HostReplay(memory.trace)
    assert list(replay.advance(len(memory.trace.events))) == [
        4 * MIB,
        5 * MIB,
        6 * MIB,
        6 * MIB,
    ]
    assert replay.classes() == {
        "pinned": 4 * MIB,
        "other tensors": 2 * MIB,
        "libraries": 0,
        "peak": 6 * MIB,
    }
    assert stretches(memory.trace)[0]["peak"] == 6 * MIB


@pytest.mark.parametrize(
    ("changes", "beyond"),
    [
        ([(1, 3, 1)], 1),
        ([(1, 4, 1)], 0),
        ([(1, 3, 1), (1, 3, -1)], 4),
        ([(1, 3, 1), (1, 3, -1), (2, 4, 1)], 0),
        ([(1, 3, 1), (1, 3, -1), (2, 5, 1)], 7),
        ([(1, 4, 1), (2, 4, 1), (1, 4, -1), (2, 4, -1), (3, 3, 1)], 5),
        ([(1, 4, 1), (1, 4, -1), (2, 4, 1), (3, 3, 1)], 1),
    ],
)
def test_blocks_of_pinned_memory_are_powers_of_two_for_reuse(changes, beyond):
    cache = PinnedCache()
    for block, size, sign in changes:
        cache.change(block, size, sign)
    assert cache.beyond == beyond


def test_classes_are_sorted_and_summed():
    assert list(with_peak({"a": 1, "b": 5, "c": 3}).items()) == [("b", 5), ("c", 3), ("a", 1), ("peak", 9)]
