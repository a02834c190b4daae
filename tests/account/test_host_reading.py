"""The host's counters at one instant."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from memtriage.account.host_reading import HostReading, read_host
from memtriage.model.census import StorageRecord
from memtriage.observe import host, malloc
from memtriage.observe.malloc import MallocInfo
from memtriage.observe.smaps import MappingClass, MemoryClasses, MemoryMapping
from support.certain import certain
from support.paths import named

MIB = 1 << 20
needs_smaps = pytest.mark.skipif(read_host() is None, reason="needs /proc/self/smaps")
needs_glibc = pytest.mark.skipif(malloc.malloc_info() is None, reason="needs glibc's malloc")


def storage(address: int, nbytes: int) -> StorageRecord:
    return StorageRecord(
        device="cpu", address=address, nbytes=nbytes, owner="variable", path=named("x"), pinned=True
    )


def reading(*mappings: MemoryMapping, free: int | None = None) -> HostReading:
    total = sum(mapping.rss for mapping in mappings)
    counters = None
    if free is not None:
        counters = MallocInfo(in_use=total - free, free=free, mapped=0, from_kernel=total)
    return HostReading(
        classes=MemoryClasses(total, mappings), malloc=counters, arenas=(), pinned=None, python_arenas=None
    )


def mapped(start: int, size: int, kind: MappingClass) -> MemoryMapping:
    return MemoryMapping(start, start + size, kind, size, size, kind)


def test_what_malloc_keeps_and_does_not_use_is_known_where_malloc_tells() -> None:
    heap = mapped(0, 10 * MIB, "heap")
    assert reading(heap).retained() is None
    assert reading(heap, free=0).retained() == 0
    assert reading(heap, free=3 * MIB).retained() == 3 * MIB


@pytest.mark.parametrize(
    ("kinds", "from_torch"),
    [
        (["shared anonymous"], True),
        (["shared"], False),
        (["file"], False),
        ([], False),
    ],
)
def test_page_locked_memory_of_torch_is_told_by_its_mapping(
    kinds: list[MappingClass], from_torch: bool
) -> None:
    mappings = [mapped(number * MIB, MIB, kind) for number, kind in enumerate(kinds)]
    assert reading(*mappings).in_driver_memory(storage(4096, MIB // 2)) is from_torch


@needs_smaps
@needs_glibc
def test_memory_of_malloc_is_torchs_where_it_has_a_mapping_of_its_own() -> None:
    """From 32 MiB on malloc always maps what it gives."""
    by_malloc = torch.empty(40 * MIB, dtype=torch.uint8)
    by_hand = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(by_hand, np.uint8)
    now = certain(read_host())
    assert now.in_driver_memory(storage(by_malloc.data_ptr(), by_malloc.nbytes))
    assert not now.in_driver_memory(storage(array.ctypes.data, 4 * MIB))
    del array
    by_hand.close()


@needs_smaps
def test_the_ledger_and_the_places_of_tensors_are_of_the_instant_of_the_reading() -> None:
    kept = torch.ones(4 * MIB)
    now = certain(read_host())
    tensor = storage(kept.data_ptr(), kept.nbytes)
    later = torch.ones(MIB)
    ledger, without = now.ledger([tensor]), now.ledger(None)
    assert ledger.total == without.total == now.classes.total == sum(row.bytes for row in ledger.rows)
    assert sum(row.bytes for row in ledger.rows if row.owner is not None) == kept.nbytes
    assert not [row for row in without.rows if row.owner is not None]
    (place,) = now.places([tensor])
    assert (place.address, place.nbytes, place.owner) == (kept.data_ptr(), kept.nbytes, "variable")
    assert later.nbytes == 4 * MIB


@needs_smaps
@pytest.mark.parametrize("smaps", [True, False])
def test_a_reading_has_every_counter_or_there_is_none(smaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not smaps:
        monkeypatch.setattr(host, "memory_classes", lambda: None)
        assert read_host() is None
        return
    now = certain(read_host())
    assert now.classes.total > 10 * MIB
    assert (now.malloc is None) == (malloc.malloc_info() is None)
    assert now.pinned == host.pinned()
    python = malloc.python_arenas()
    assert (now.python_arenas is None) == (python is None)
    assert now.malloc is None or len(now.arenas) > 0


@needs_smaps
@needs_glibc
def test_memory_that_neither_malloc_nor_python_gives_out_is_known_within_what_was_never_written() -> None:
    """A buffer of malloc moves the least alone while it fills, and never beyond the most of before."""

    def other() -> tuple[int, int]:
        now = certain(read_host())
        return now.other_memory(now.ledger(None).rows)["host"]

    least, most = other()
    buffer = np.zeros(40 * MIB, np.uint8)
    of_buffer = other()
    buffer[:] = 1
    filled = other()
    by_hand = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    by_hand.write(bytes(16 * MIB))
    mapped_by_hand = other()
    by_hand.close()
    assert of_buffer == (pytest.approx(least - 40 * MIB, abs=MIB), pytest.approx(most, abs=MIB))
    assert filled == (pytest.approx(least, abs=MIB), pytest.approx(most + 40 * MIB, abs=MIB))
    assert [after - before for before, after in zip(filled, mapped_by_hand, strict=True)] == (
        pytest.approx([16 * MIB] * 2, abs=MIB)
    )
    assert reading(mapped(0, MIB, "anonymous")).other_memory() == {}
