"""The host memory of parked storages: exact, whole, and kept."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.observe.cgroup import CgroupMemory
from memtriage.treat.parking.arena import ALIGNMENT, Home, HostArena

PAGE = 4096


def spans(homes: list[Home]) -> list[tuple[int, int, int]]:
    return sorted((id(p.chunk), p.start, p.length) for home in homes for p in home)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_homes_never_overlap_and_nothing_is_lost(data: st.DataObject) -> None:
    arena = HostArena(pin=False, chunk=2 * PAGE)
    taken: list[tuple[int, Home]] = []
    for _ in range(data.draw(st.integers(1, 15))):
        if taken and data.draw(st.booleans()):
            arena.give([taken.pop(data.draw(st.integers(0, len(taken) - 1)))[1]])
        else:
            sizes = data.draw(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4))
            taken += zip(sizes, arena.take(sizes), strict=True)
        used = sum(-(-size // ALIGNMENT) * ALIGNMENT for size, _ in taken)
        assert arena.used == used <= arena.owned
        for size, home in taken:
            assert size <= sum(piece.length for piece in home) < size + ALIGNMENT
        ordered = spans([home for _, home in taken])
        assert all(one[0] != other[0] or one[1] + one[2] <= other[1] for one, other in pairwise(ordered))
    arena.give(home for _, home in taken)
    owned = arena.owned
    assert (arena.used, arena.release(), arena.owned) == (0, owned, 0)


def test_it_maps_what_is_missing_and_no_more() -> None:
    arena = HostArena(pin=False, chunk=16 * PAGE)
    first = arena.take([5 * PAGE])
    assert arena.owned == 5 * PAGE
    arena.give(first)
    arena.take([2 * PAGE, 4 * PAGE])
    assert arena.owned == 6 * PAGE


def test_a_home_is_memory_that_can_be_written() -> None:
    arena = HostArena(pin=False, chunk=PAGE)
    (home,) = arena.take([3 * PAGE])
    assert len(home) == 3
    for number, piece in enumerate(home):
        piece.bytes.fill_(number + 1)
    assert [int(piece.bytes.sum()) for piece in home] == [PAGE, 2 * PAGE, 3 * PAGE]


def test_only_idle_chunks_are_released() -> None:
    arena = HostArena(pin=False, chunk=PAGE)
    kept, given_back = arena.take([PAGE, PAGE])
    arena.give([given_back])
    assert (arena.release(), arena.owned, arena.used) == (PAGE, PAGE, PAGE)
    assert kept[0].bytes.numel() == PAGE


def test_more_than_the_machine_has_is_refused() -> None:
    arena = HostArena(pin=False)
    with pytest.raises(MemoryError, match=r"parking needs 8\.0 EiB more host memory, and .* park less"):
        arena.take([1 << 63])
    assert arena.owned == 0


@pytest.mark.parametrize(
    ("figures", "fits"),
    [
        pytest.param(None, True, id="no group"),
        pytest.param({"usage": 6 * PAGE}, True, id="just enough"),
        pytest.param({"usage": 6 * PAGE + 1}, False, id="too little"),
        pytest.param({"usage": 8 * PAGE, "file": 3 * PAGE, "shmem": PAGE}, True, id="files are reclaimed"),
        pytest.param({"usage": 8 * PAGE, "file": 3 * PAGE, "shmem": PAGE + 1}, False, id="shared are not"),
        pytest.param({"usage": PAGE, "limit": None}, True, id="no limit"),
    ],
)
def test_what_the_control_group_leaves(figures: Any, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group = figures and CgroupMemory(**{"version": 2, "path": "/g", "limit": 10 * PAGE} | figures)
    monkeypatch.setattr("memtriage.treat.parking.arena.cgroup_memory", lambda: group)
    arena = HostArena(pin=False)
    if fits:
        assert arena.take([4 * PAGE])
    else:
        with pytest.raises(
            MemoryError, match=r"parking needs 16\.0 KiB .* left under the limit of cgroup v2 /g"
        ):
            arena.take([4 * PAGE])
