"""The host ledger must sum to the resident set whatever it is given, and place bytes where they are."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.host_ledger import host_ledger
from memtriage.model.census import Owner, StorageRecord
from memtriage.model.ledger import Ledger
from memtriage.observe.host import PinnedStats, memory_classes
from memtriage.observe.malloc import MallocInfo, malloc_info
from memtriage.observe.malloc_arenas import MallocArena
from memtriage.observe.smaps import MappingClass, MemoryClasses, MemoryMapping
from support.paths import named

MIB = 1 << 20
PAGE = 4096


def mapping(
    start: int, size: int, kind: MappingClass, rss: int | None = None, copied: int = 0
) -> MemoryMapping:
    return MemoryMapping(start, start + size, kind, size if rss is None else rss, copied, kind)


def memory(*mappings: MemoryMapping) -> MemoryClasses:
    return MemoryClasses(sum(item.rss for item in mappings), mappings)


def storage(
    address: int, nbytes: int, owner: Owner = "parameter", *, pinned: bool = False, holder: str | None = None
) -> StorageRecord:
    return StorageRecord(
        device="cpu",
        address=address,
        nbytes=nbytes,
        owner=owner,
        pinned=pinned,
        path=None if holder is None else named(holder),
    )


def counters(in_use: int, free: int = 0, mapped: int = 0) -> MallocInfo:
    return MallocInfo(
        in_use=in_use,
        free=free,
        mapped=mapped,
        from_kernel=in_use + free,
    )


def all_resident(address: int, nbytes: int) -> int | None:
    return nbytes


def sizes(ledger: Ledger) -> dict[tuple[str, str | None], int]:
    table = {(row.row, row.owner): row.bytes for row in ledger.rows}
    assert len(table) == len(ledger.rows)
    assert sum(table.values()) == ledger.total
    return table


# -- the law ---------------------------------------------------------------------------------------------

AMOUNTS = st.integers(0, 40 * PAGE)
OWNERS: tuple[Owner, ...] = get_args(Owner)


@st.composite
def address_spaces(draw: st.DrawFn) -> MemoryClasses:
    at = PAGE
    mappings = []
    kinds = st.sampled_from(get_args(MappingClass))
    for gap, pages, kind in draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), kinds), max_size=9)
    ):
        start = at + gap * PAGE
        resident = draw(st.integers(0, pages * PAGE))
        mappings.append(mapping(start, pages * PAGE, kind, resident, draw(st.integers(0, resident))))
        at = start + pages * PAGE
    return memory(*mappings)


storages = st.builds(
    StorageRecord,
    device=st.sampled_from(["cpu", "cpu", "cpu", "cuda:0"]),
    address=st.integers(0, 60 * PAGE),
    nbytes=AMOUNTS,
    owner=st.sampled_from(OWNERS),
    pinned=st.booleans(),
    shared=st.booleans(),
)
mallocs = st.builds(
    MallocInfo,
    in_use=AMOUNTS,
    free=AMOUNTS,
    mapped=AMOUNTS,
    from_kernel=AMOUNTS,
)
pinned_counters = st.builds(
    PinnedStats, owned=AMOUNTS, active=st.none() | AMOUNTS, cached=st.none() | AMOUNTS
)


@given(
    found=st.none() | st.lists(storages, max_size=8),
    classes=address_spaces(),
    malloc=st.none() | mallocs,
    pinned=st.none() | pinned_counters,
    arenas=st.none() | AMOUNTS,
    answer=st.sampled_from([None, 0, 0.5, 1, 3, -1]),
)
def test_rows_sum_to_the_total_and_none_is_negative(
    found: list[StorageRecord] | None,
    classes: MemoryClasses,
    malloc: MallocInfo | None,
    pinned: PinnedStats | None,
    arenas: int | None,
    answer: float | None,
) -> None:
    def resident(address: int, nbytes: int) -> int | None:
        return None if answer is None else int(answer * nbytes)

    ledger = host_ledger(found, classes, malloc, pinned, resident, arenas)
    assert ledger.total == classes.total
    assert sum(row.bytes for row in ledger.rows) == ledger.total
    assert all(row.bytes > 0 for row in ledger.rows if row.row != "unexplained")
    assert [row.row for row in ledger.rows[:-1]].count("unexplained") == 0
    keys = [(row.row, row.owner) for row in ledger.rows]
    assert len(set(keys)) == len(keys)


@given(found=st.lists(storages, max_size=8), classes=address_spaces(), malloc=mallocs)
def test_nothing_is_unexplained_when_tensors_fit_their_mappings(
    found: list[StorageRecord], classes: MemoryClasses, malloc: MallocInfo
) -> None:
    full = memory(*(mapping(item.start, item.end - item.start, item.kind) for item in classes.mappings))
    ledger = host_ledger(found, full, malloc, None, all_resident)
    assert "unexplained" not in [row.row for row in ledger.rows]


@given(found=st.lists(storages, max_size=8), classes=address_spaces())
def test_every_mapped_byte_counts_for_one_tensor_at_most(
    found: list[StorageRecord], classes: MemoryClasses
) -> None:
    full = memory(*(mapping(item.start, item.end - item.start, item.kind) for item in classes.mappings))
    covered = {
        byte
        for item in found
        if item.device == "cpu" and item.address
        for low, high, _ in full.covering(item.address, item.address + item.nbytes)
        for byte in range(low, high)
    }
    ledger = host_ledger(found, full, None, None, all_resident)
    assert sum(row.bytes for row in ledger.rows if row.owner) == len(covered)


# -- where bytes are placed ------------------------------------------------------------------------------


def test_a_plain_process() -> None:
    classes = memory(
        mapping(10 * MIB, 20 * MIB, "library"),
        mapping(100 * MIB, 50 * MIB, "heap"),
        mapping(200 * MIB, 64 * MIB, "anonymous"),
        mapping(300 * MIB, MIB, "stack"),
    )
    records = [
        storage(101 * MIB, 8 * MIB),
        storage(120 * MIB, 4 * MIB, "gradient"),
        storage(200 * MIB, 40 * MIB, holder="train.model.weight"),
        StorageRecord(device="cuda:0", address=130 * MIB, nbytes=MIB, owner="parameter"),
    ]
    malloc = counters(in_use=12 * MIB + 5 * MIB + 41 * MIB, free=33 * MIB, mapped=41 * MIB)
    ledger = host_ledger(records, classes, malloc, None, all_resident, python_arenas=20 * MIB)
    assert sizes(ledger) == {
        ("CPU tensors", "parameter"): 48 * MIB,
        ("CPU tensors", "gradient"): 4 * MIB,
        ("malloc in use", None): 6 * MIB,
        ("malloc retained", None): 33 * MIB,
        ("Python objects", None): 20 * MIB,
        ("other anonymous memory", None): 3 * MIB,
        ("libraries", None): 20 * MIB,
        ("stacks", None): MIB,
    }
    assert ledger.device == "host"
    assert ledger.rows[0].detail == "2 storages; largest kept alive by train.model.weight"


def test_trimmed_free_chunks_are_not_retained() -> None:
    classes = memory(mapping(100 * MIB, 60 * MIB, "heap", rss=12 * MIB))
    malloc = counters(in_use=11 * MIB, free=49 * MIB)
    ledger = host_ledger([storage(100 * MIB, 8 * MIB)], classes, malloc, None, all_resident)
    assert sizes(ledger) == {
        ("CPU tensors", "parameter"): 8 * MIB,
        ("malloc in use", None): 3 * MIB,
        ("malloc retained", None): MIB,
    }


def test_an_untouched_tensor_takes_nothing_from_others() -> None:
    """malloc counts the 40 MiB that nobody wrote to; they must not be charged to numpy arrays."""
    classes = memory(mapping(100 * MIB, 60 * MIB, "anonymous", rss=20 * MIB))
    malloc = counters(in_use=45 * MIB, mapped=45 * MIB)
    ledger = host_ledger([storage(110 * MIB, 40 * MIB)], classes, malloc, None, lambda address, nbytes: 0)
    assert sizes(ledger) == {
        ("malloc in use", None): 5 * MIB,
        ("other anonymous memory", None): 15 * MIB,
    }


def test_tensors_in_files_and_shared_memory_belong_there() -> None:
    classes = memory(
        mapping(100 * MIB, 30 * MIB, "file", copied=2 * MIB),
        mapping(200 * MIB, 10 * MIB, "shared"),
        mapping(300 * MIB, 10 * MIB, "heap"),
    )
    records = [storage(110 * MIB, 4 * MIB), storage(200 * MIB, 10 * MIB, "variable")]
    table = sizes(host_ledger(records, classes, counters(in_use=10 * MIB), None, all_resident))
    assert table == {
        ("tensors in mapped files", "parameter"): 4 * MIB,
        ("tensors in shared memory", "variable"): 10 * MIB,
        ("malloc in use", None): 10 * MIB,
        ("mapped files", None): 26 * MIB,
    }


def test_mapped_files_say_what_was_copied_on_write() -> None:
    classes = memory(mapping(100 * MIB, 30 * MIB, "file", copied=2 * MIB))
    (row,) = host_ledger([], classes, None, None, all_resident).rows
    assert row.detail is not None
    assert "reclaimable, not a leak; but 2.0 MiB copied on write" in row.detail


def test_pinned_memory_of_cuda_host_alloc() -> None:
    """1.1 GiB asked for, 2 GiB owned, in shared mappings without a file; 512 MiB more cached."""
    classes = memory(
        mapping(4 << 30, 2 << 30, "shared anonymous"),
        mapping(8 << 30, 512 * MIB, "shared anonymous"),
        mapping(9 << 30, 10 * MIB, "shared anonymous"),
        mapping(10 << 30, 30 * MIB, "anonymous"),
    )
    stats = PinnedStats(owned=(2 << 30) + 512 * MIB, active=2 << 30, cached=512 * MIB)
    records = [storage(4 << 30, 1100 * MIB, "variable", pinned=True)]
    assert sizes(host_ledger(records, classes, counters(in_use=0), stats, all_resident)) == {
        ("pinned tensors", "variable"): 1100 * MIB,
        ("pinned rounding", None): (2 << 30) - 1100 * MIB,
        ("pinned cached", None): 512 * MIB,
        ("other anonymous memory", None): 30 * MIB,
        ("shared anonymous memory", None): 10 * MIB,
    }


def test_pinned_memory_of_a_torch_that_does_not_count_frees() -> None:
    classes = memory(mapping(4 << 30, 128 * MIB, "shared anonymous"))
    records = [storage(4 << 30, 100 * MIB, "variable", pinned=True)]
    ledger = host_ledger(records, classes, None, PinnedStats(owned=120 * MIB), all_resident)
    assert sizes(ledger) == {
        ("pinned tensors", "variable"): 100 * MIB,
        ("pinned rounding and cached", None): 20 * MIB,
        ("shared anonymous memory", None): 8 * MIB,
    }
    ledger = host_ledger(None, classes, None, PinnedStats(owned=120 * MIB), all_resident)
    assert sizes(ledger)["pinned memory", None] == 120 * MIB


def test_registered_pinned_memory_is_not_counted_twice() -> None:
    classes = memory(
        mapping(MIB, 10 * MIB, "shared anonymous"),
        mapping(4 << 30, 128 * MIB, "anonymous"),
        mapping(5 << 30, 20 * MIB, "heap"),
        mapping(6 << 30, 30 * MIB, "anonymous"),
    )
    stats = PinnedStats(owned=128 * MIB, active=128 * MIB, cached=0)
    records = [storage(4 << 30, 100 * MIB, "variable", pinned=True)]
    malloc = counters(in_use=128 * MIB + 20 * MIB, mapped=128 * MIB)
    assert sizes(host_ledger(records, classes, malloc, stats, all_resident)) == {
        ("pinned tensors", "variable"): 100 * MIB,
        ("pinned rounding", None): 28 * MIB,
        ("malloc in use", None): 20 * MIB,
        ("other anonymous memory", None): 30 * MIB,
        ("shared anonymous memory", None): 10 * MIB,
    }


def test_pinned_memory_that_others_registered_is_not_torchs() -> None:
    classes = memory(mapping(4 << 30, 64 * MIB, "anonymous"), mapping(5 << 30, 16 * MIB, "anonymous"))
    records = [storage(4 << 30, 64 * MIB, "optimizer state", pinned=True)]
    malloc = counters(in_use=16 * MIB, mapped=16 * MIB)
    stats = PinnedStats(owned=0, active=0, cached=0)
    assert sizes(host_ledger(records, classes, malloc, stats, all_resident)) == {
        ("pinned tensors", "optimizer state"): 64 * MIB,
        ("malloc in use", None): 16 * MIB,
    }


def test_overlapping_storages_count_once() -> None:
    classes = memory(mapping(100 * MIB, 10 * MIB, "heap"))
    records = [
        storage(100 * MIB, 4 * MIB, "variable"),
        storage(100 * MIB, 4 * MIB, "parameter"),
        storage(102 * MIB, 4 * MIB, "buffer"),
        storage(103 * MIB, MIB, "gradient"),
    ]
    table = sizes(host_ledger(records, classes, counters(in_use=10 * MIB), None, all_resident))
    assert table == {
        ("CPU tensors", "parameter"): 4 * MIB,
        ("CPU tensors", "buffer"): 2 * MIB,
        ("malloc in use", None): 4 * MIB,
    }


def test_a_storage_over_two_mappings_is_split() -> None:
    classes = memory(mapping(100 * MIB, 2 * MIB, "heap"), mapping(102 * MIB, 2 * MIB, "anonymous"))
    asked = []

    def resident(address: int, nbytes: int) -> int | None:
        asked.append((address, nbytes))
        return nbytes

    ledger = host_ledger([storage(101 * MIB, 2 * MIB)], classes, None, None, resident)
    assert asked == [(101 * MIB, MIB), (102 * MIB, MIB)]
    assert sizes(ledger) == {
        ("CPU tensors", "parameter"): 2 * MIB,
        ("other anonymous memory", None): 2 * MIB,
    }
    assert ledger.rows[0].detail == "1 storage"


def test_a_storage_mapped_after_the_reading_is_left_out() -> None:
    classes = memory(mapping(100 * MIB, 2 * MIB, "anonymous"))
    ledger = host_ledger([storage(500 * MIB, MIB)], classes, None, None, all_resident)
    assert sizes(ledger) == {("other anonymous memory", None): 2 * MIB}


def test_tensors_that_exceed_their_mappings_show_as_unexplained() -> None:
    classes = memory(mapping(100 * MIB, 10 * MIB, "heap", rss=4 * MIB), mapping(200 * MIB, MIB, "library"))
    table = sizes(host_ledger([storage(100 * MIB, 6 * MIB)], classes, counters(in_use=8), None, all_resident))
    assert table == {
        ("CPU tensors", "parameter"): 6 * MIB,
        ("libraries", None): MIB,
        ("unexplained", None): -2 * MIB,
    }


def test_unknown_residency_is_bounded_by_the_mapping_and_said() -> None:
    classes = memory(mapping(100 * MIB, 10 * MIB, "anonymous", rss=3 * MIB))
    ledger = host_ledger([storage(100 * MIB, 8 * MIB)], classes, None, None, lambda address, nbytes: None)
    assert sizes(ledger) == {("CPU tensors", "parameter"): 3 * MIB}
    assert "the kernel does not report" in str(ledger.rows[0].detail)


def test_tensors_in_device_memory_that_is_no_part_of_rss() -> None:
    """Drivers map pages that are present and that the kernel leaves out of RSS."""
    classes = memory(mapping(100 * MIB, 64 * MIB, "device", rss=0), mapping(200 * MIB, MIB, "library"))
    ledger = host_ledger([storage(100 * MIB, 64 * MIB, pinned=True)], classes, None, None, all_resident)
    assert sizes(ledger) == {("libraries", None): MIB}


def test_without_a_census_the_rows_say_that_they_hold_tensors() -> None:
    classes = memory(mapping(100 * MIB, 10 * MIB, "heap"), mapping(200 * MIB, 8 * MIB, "shared anonymous"))
    stats = PinnedStats(owned=8 * MIB, active=6 * MIB, cached=2 * MIB)
    ledger = host_ledger(None, classes, counters(in_use=10 * MIB), stats, all_resident)
    assert sizes(ledger) == {
        ("pinned in use", None): 6 * MIB,
        ("pinned cached", None): 2 * MIB,
        ("malloc in use", None): 10 * MIB,
    }
    assert all("no census" in str(row.detail) for row in ledger.rows if row.row.endswith("in use"))


# -- a real process --------------------------------------------------------------------------------------

needs_counters = pytest.mark.skipif(
    malloc_info() is None or memory_classes() is None, reason="no glibc counters, or no smaps"
)
RETENTION = """
import ctypes
from memtriage.account.host_ledger import host_ledger
from memtriage.observe.host import memory_classes, resident
from memtriage.observe.malloc import malloc_info, python_arenas

def read():
    ledger = host_ledger([], memory_classes(), malloc_info(), None, resident, python_arenas())
    assert sum(row.bytes for row in ledger.rows) == ledger.total
    rows = {row.row: row.bytes for row in ledger.rows}
    return ledger.total, rows.get("malloc retained", 0), abs(rows.get("unexplained", 0))

blocks = [bytearray(b"x") * 100_000 for _ in range(600)]
del blocks[:-1]
before = read()
ctypes.CDLL(None).malloc_trim(0)
print(*before, *read())
"""


@needs_counters
def test_retained_is_what_malloc_trim_gives_back() -> None:
    done = subprocess.run([sys.executable, "-c", RETENTION], capture_output=True, text=True, check=True)
    total, retained, unexplained, total_after, retained_after, _ = map(int, done.stdout.split())
    given_back = total - total_after
    assert given_back > 50_000_000
    assert abs(retained - retained_after - given_back) < 3_000_000
    assert retained_after < 3_000_000
    assert unexplained == 0


def test_tensors_in_own_mappings_take_nothing_from_malloc() -> None:
    """202 MiB of optimizer state in a mapping of its own; malloc's mapped block of 10 MiB is an array."""
    classes = memory(mapping(100 * MIB, 202 * MIB, "anonymous"), mapping(400 * MIB, 10 * MIB, "anonymous"))
    malloc = counters(in_use=10 * MIB, mapped=10 * MIB)
    ledger = host_ledger(
        [storage(100 * MIB, 202 * MIB, "optimizer state")],
        classes,
        malloc,
        None,
        all_resident,
        of_malloc=lambda address, nbytes: False,
    )
    assert sizes(ledger) == {("CPU tensors", "optimizer state"): 202 * MIB, ("malloc in use", None): 10 * MIB}


@pytest.mark.parametrize("answer", [True, None])
def test_a_tensor_counts_as_mallocs_unless_it_is_known_not_to_be(answer: bool | None) -> None:
    classes = memory(mapping(100 * MIB, 20 * MIB, "anonymous"))
    malloc = counters(in_use=20 * MIB, mapped=20 * MIB)
    ledger = host_ledger(
        [storage(100 * MIB, 20 * MIB)],
        classes,
        malloc,
        None,
        all_resident,
        of_malloc=lambda address, nbytes: answer,
    )
    assert sizes(ledger) == {("CPU tensors", "parameter"): 20 * MIB}


def test_the_middle_of_a_block_is_not_asked_about() -> None:
    """Only a page's start can be the start of a mapping; a slice of an array has no header before it."""
    classes = memory(mapping(100 * MIB, 20 * MIB, "anonymous"))
    asked: list[int] = []

    def of_malloc(address: int, nbytes: int) -> bool:
        asked.append(address)
        return False

    records = [storage(100 * MIB + 64, MIB), storage(110 * MIB, MIB)]
    host_ledger(records, classes, counters(in_use=MIB), None, all_resident, of_malloc=of_malloc)
    assert asked == [110 * MIB]


def test_retained_memory_says_how_much_a_trim_returns() -> None:
    classes = memory(mapping(100 * MIB, 60 * MIB, "heap"))
    arenas = [MallocArena(30 * MIB, 25 * MIB), MallocArena(9 * MIB, 9 * MIB)]
    malloc = counters(in_use=21 * MIB, free=39 * MIB)
    ledger = host_ledger([], classes, malloc, None, all_resident, arenas=arenas)
    (row,) = [row for row in ledger.rows if row.row == "malloc retained"]
    assert row.bytes == 39 * MIB
    assert "2 arenas" in str(row.detail) and "would return 34.0 MiB" in str(row.detail)
