"""The GPU ledger closes, counts every byte once, and names what the brief cases call for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account import gpu_ledger as ledger_module
from memtriage.account.gpu_ledger import (
    gpu_ledger,
    outside_allocator,
    releasable_in,
    segment_totals,
    stranded_segments,
    workspace_sizes,
)
from memtriage.model.blocks import DEFAULT_POOL, Block, DriverUse, Segment
from memtriage.model.census import StorageRecord
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.observe.cuda import parse_segments
from support.paths import named

MIB = 1 << 20
DATA = Path(__file__).parent.parent / "data"


def make_segment(
    address: int, *parts: tuple[str, int, int], pool: tuple[int, int] = DEFAULT_POOL, **fields: object
) -> Segment:
    """A segment of (state, size, requested) blocks."""
    blocks: list[Block] = []
    position = address
    for state, size, requested in parts:
        blocks.append(Block(address=position, size=size, requested=requested, state=state))  # type: ignore[arg-type]
        position += size
    settings = {"device": 0, "stream": 0, "expandable": "page" in fields, **fields}
    return Segment(
        address=address,
        size=position - address,
        pool=pool,
        blocks=tuple(blocks),
        **settings,  # type: ignore[arg-type]
    )


def storage(address: int, nbytes: int, owner: str = "variable", holder: str | None = "x") -> StorageRecord:
    return StorageRecord(
        device="cuda:0",
        address=address,
        nbytes=nbytes,
        owner=owner,
        path=None if holder is None else named(holder),  # type: ignore[arg-type]
    )


def use_of(
    used: int, own: int | None = None, processes: tuple[tuple[int, int | None], ...] = ()
) -> DriverUse:
    return DriverUse(total=1 << 40, used=used, processes=processes, own=own, source="test")


def sums(ledger: Ledger) -> dict[tuple[str, str | None], int]:
    rows: Counter[tuple[str, str | None]] = Counter()
    for row in ledger.rows:
        rows[row.row, row.owner] += row.bytes
    return dict(rows)


def row_of(ledger: Ledger, name: str, owner: str | None = None) -> LedgerRow:
    (found,) = [row for row in ledger.rows if row.row == name and row.owner == owner]
    return found


# --- laws ---------------------------------------------------------------------------------------------------

block_parts = st.tuples(
    st.sampled_from(["active", "active", "awaiting", "free"]), st.integers(1, 12), st.integers(0, 12)
)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    position = 10
    segments: list[Segment] = []
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.integers(0, 6))
        parts = [
            (state, size, 0 if state == "free" else min(asked, size))
            for state, size, asked in draw(st.lists(block_parts, min_size=1, max_size=5))
        ]
        fields = draw(st.sampled_from([{}, {"page": 4}]))
        pool = draw(st.sampled_from([DEFAULT_POOL, (0, 1), (3, 0)]))
        segments.append(
            make_segment(position, *parts, pool=pool, stream=draw(st.sampled_from([0, 7])), **fields)
        )
        position = segments[-1].end
    return segments


storage_lists = st.lists(
    st.builds(
        storage,
        st.integers(0, 160),
        st.integers(0, 40),
        st.sampled_from(["parameter", "gradient", "variable", "c++ only"]),
        st.sampled_from(["a", "b", None]),
    ),
    max_size=6,
)
uses = st.builds(
    use_of,
    st.integers(0, 400),
    st.none() | st.integers(0, 400),
    st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(0, 50)), max_size=2).map(tuple),
)


@given(segment_lists() | st.none(), storage_lists, uses, st.none() | st.integers(0, 60))
def test_rows_sum_to_the_driver_figure(
    segments: list[Segment] | None, storages: list[StorageRecord], use: DriverUse, baseline: int | None
) -> None:
    ledger = gpu_ledger("cuda:0", segments, storages, use, baseline)
    assert sum(row.bytes for row in ledger.rows) == use.used == ledger.total
    assert all(row.bytes > 0 for row in ledger.rows if row.row != "unexplained")
    assert sum(row.row == "unexplained" for row in ledger.rows) <= 1


def expected_rows(segments: list[Segment], storages: list[StorageRecord]) -> Counter[tuple[str, str | None]]:
    """Each byte of the segments classed by itself, the slow and obvious way."""
    order = sorted(
        (record for record in storages if record.address), key=lambda one: (one.address, -one.nbytes)
    )
    rows: Counter[tuple[str, str | None]] = Counter()
    for segment in segments:
        wholly_free = all(block.state == "free" for block in segment.blocks)
        for block in segment.blocks:
            for byte in range(block.address, block.end):
                if block.state == "awaiting":
                    rows["awaiting stream events", None] += 1
                elif block.state == "free":
                    freed = wholly_free
                    if segment.page and not wholly_free:
                        page = (byte - segment.address) // segment.page * segment.page + segment.address
                        freed = block.address <= page and page + segment.page <= block.end
                    rows["releasable" if freed else "stranded", None] += 1
                elif byte >= block.address + block.requested:
                    rows["rounding", None] += 1
                else:
                    owner = next(
                        (s.owner for s in order if s.address <= byte < s.address + s.nbytes), "c++ only"
                    )
                    rows["requested", owner] += 1
    return rows


@given(segment_lists(), storage_lists)
def test_every_byte_of_a_segment_is_in_one_row_and_the_others_are_foreign(
    segments: list[Segment], storages: list[StorageRecord]
) -> None:
    reserved = sum(segment.size for segment in segments)
    # Foreign storages take from what is outside, so leave room for them: the segments' rows stay apart.
    ledger = gpu_ledger("cuda:0", segments, storages, use_of(reserved + 1000, own=reserved + 1000))
    outside = {"outside the allocator", "foreign memory"}
    rows = {key: size for key, size in sums(ledger).items() if key[0] not in outside}
    assert rows == dict(expected_rows(segments, storages))
    named = {
        byte
        for record in storages
        if record.address
        for byte in range(record.address, record.address + record.nbytes)
    }
    inside = {byte for segment in segments for byte in range(segment.address, segment.end)}
    assert sums(ledger).get(("foreign memory", None), 0) == len(named - inside)


# --- cases --------------------------------------------------------------------------------------------------


def test_requested_names_owner_and_biggest_holders() -> None:
    segment = make_segment(4096, ("active", 512, 500), ("active", 1024, 1024), ("free", 2048, 0))
    storages = [storage(4096, 500, "parameter", "model.a"), storage(4608, 1024, "parameter", "model.b")]
    ledger = gpu_ledger("cuda:0", [segment], storages, use_of(5000, own=5000), 1000)
    assert sums(ledger) == {
        ("requested", "parameter"): 1524,
        ("rounding", None): 12,
        ("stranded", None): 2048,
        ("context", None): 1000,
        ("outside the allocator", None): 416,
    }
    assert row_of(ledger, "requested", "parameter").detail == "model.b 1.0 KiB, model.a 500 B"


def test_equal_holders_are_one_name_with_a_count() -> None:
    segment = make_segment(4096, *[("active", 512, 512)] * 6)
    storages = [storage(4096 + 512 * i, 512, "variable", "losses[*]") for i in range(6)]
    detail = row_of(gpu_ledger("cuda:0", [segment], storages, use_of(3072)), "requested", "variable").detail
    assert detail == "losses[*] 3.0 KiB in 6"


def test_blocks_that_only_cpp_holds_are_named_by_their_site() -> None:
    block = Block(address=4096, size=512, requested=512, state="active", site="train.py:7 in fwd")
    segment = msgspec.structs.replace(make_segment(4096, ("active", 512, 512)), blocks=(block,))
    detail = row_of(gpu_ledger("cuda:0", [segment], [], use_of(512)), "requested", "c++ only").detail
    assert detail == "allocated at train.py:7 in fwd 512 B"


def test_without_a_census_requested_has_no_owner() -> None:
    assert sums(gpu_ledger("cuda:0", [workspaces(2)], None, use_of(64 * MIB))) == {
        ("requested", None): 64 * MIB
    }


def test_private_pools_have_rows_of_their_own() -> None:
    segments = [
        make_segment(4096, ("active", 512, 512)),
        make_segment(8192, ("active", 512, 512), ("free", 512, 0), pool=(0, 1)),
        make_segment(12288, ("free", 2048, 0), pool=(2, 0)),
    ]
    storages = [storage(4096, 512), storage(8192, 512)]
    ledger = gpu_ledger("cuda:0", segments, storages, use_of(3584 + 0))
    assert sums(ledger) == {
        ("requested", "variable"): 1024,
        ("stranded", None): 512,
        ("releasable", None): 2048,
    }
    default, private = [row for row in ledger.rows if row.row == "requested"]
    assert private.detail == "private pools: 0.1 512 B; x 512 B"
    assert default.detail == "x 512 B"
    assert "2.0 2.0 KiB" in (row_of(ledger, "releasable").detail or "")
    assert segment_totals(segments).private_pools == 3072


def test_stranded_names_what_pins_the_worst_segment() -> None:
    segment = make_segment(20 * MIB, ("active", 2 * MIB, 2 * MIB), ("free", 18 * MIB, 0))
    ledger = gpu_ledger(
        "cuda:0", [segment], [storage(20 * MIB, 2 * MIB, "known cache", "model._cache[*]")], use_of(20 * MIB)
    )
    assert row_of(ledger, "stranded").detail == (
        "1 segment; 18.0 MiB free in a segment of 20.0 MiB pinned by 1 block of 2.0 MiB, "
        "the biggest model._cache[*] (known cache)"
    )


def test_an_expandable_segment_releases_whole_pages_only() -> None:
    segment = make_segment(100, ("active", 3, 3), ("free", 10, 0), ("active", 1, 1), ("free", 6, 0), page=4)
    # Pages from address 100: [0,4) used, [4,8) and [8,12) free, [12,16) used, [16,20) free.
    assert releasable_in(segment) == 12
    remark = row_of(gpu_ledger("cuda:0", [segment], [], use_of(20)), "releasable").detail
    assert remark is not None and "estimated in pages of 4 B" in remark


def workspaces(count: int, size: int = 32 * MIB, **fields: object) -> Segment:
    return make_segment(64 * MIB, *[("active", size, size)] * count, **fields)


def test_cublas_workspaces_are_recognized_and_the_reason_told() -> None:
    ledger = gpu_ledger("cuda:0", [workspaces(2)], [], use_of(64 * MIB))
    row = row_of(ledger, "requested", "cuBLAS workspace")
    assert row.bytes == 64 * MIB
    assert "recognized by size (33,554,432 bytes)" in (row.detail or "")


def test_a_storage_of_the_size_of_a_workspace_keeps_its_owner() -> None:
    ledger = gpu_ledger(
        "cuda:0", [workspaces(1)], [storage(64 * MIB, 32 * MIB, "parameter")], use_of(32 * MIB)
    )
    assert sums(ledger) == {("requested", "parameter"): 32 * MIB}


def test_workspaces_have_the_sizes_that_are_given() -> None:
    ledger = gpu_ledger("cuda:0", [workspaces(1)], [], use_of(32 * MIB), workspaces=workspace_sizes(":16:8"))
    assert sums(ledger) == {("requested", "c++ only"): 32 * MIB}


def test_other_processes_and_unseen_ones_have_separate_rows() -> None:
    use = use_of(1000, own=400, processes=((7, 100), (8, 50)))
    ledger = gpu_ledger("cuda:0", [make_segment(4096, ("free", 256, 0))], [], use, 100)
    assert sums(ledger) == {
        ("releasable", None): 256,
        ("context", None): 100,
        ("outside the allocator", None): 44,
        ("other processes", None): 150,
        ("no visible process", None): 450,
    }
    assert row_of(ledger, "other processes").detail == "pid 7 100 B, pid 8 50 B"


def test_a_process_of_unknown_size_is_not_counted_as_nobody() -> None:
    ledger = gpu_ledger("cuda:0", [], [], use_of(1000, own=400, processes=((7, 100), (8, None))))
    assert sums(ledger) == {("outside the allocator", None): 400, ("other processes", None): 600}
    assert "of 1 process the driver does not report the size" in (
        row_of(ledger, "other processes").detail or ""
    )


def test_outside_row_includes_others_without_own_use() -> None:
    segment = make_segment(4096, ("free", 256, 0))
    unknown = use_of(1000, own=None, processes=((7, 300),))
    ledger = gpu_ledger("cuda:0", [segment], [], unknown, 500)
    assert sums(ledger) == {
        ("releasable", None): 256,
        ("context", None): 500,
        ("outside the allocator", None): 244,
    }
    assert "includes other processes" in (row_of(ledger, "outside the allocator").detail or "")
    # A process id that coincides with the host's: less than the allocator holds cannot be this process.
    assert sums(gpu_ledger("cuda:0", [segment], [], use_of(1000, own=100), 500)) == sums(ledger)


def test_baseline_is_taken_with_the_function_of_the_same_meaning() -> None:
    assert outside_allocator(use_of(1000, own=400), 250) == 150
    assert outside_allocator(use_of(1000), 250) == 750
    assert outside_allocator(use_of(1000, own=100), 250) == 750
    assert outside_allocator(use_of(100), 250) == 0


def test_storages_outside_every_segment_are_foreign() -> None:
    segment = make_segment(4096, ("active", 512, 512))
    storages = [storage(4096, 512), storage(1 << 30, 300, holder="ipc.buffer")]
    ledger = gpu_ledger("cuda:0", [segment], storages, use_of(2000, own=1000, processes=((7, 900),)))
    assert sums(ledger)["foreign memory", None] == 300
    assert sums(ledger)["outside the allocator", None] == 188
    assert "ipc.buffer (variable) 300 B" in (row_of(ledger, "foreign memory").detail or "")


def test_foreign_memory_in_no_figure_is_mentioned_only() -> None:
    ledger = gpu_ledger("cuda:0", [], [storage(1 << 30, 5000)], use_of(1000, own=1000))
    assert sums(ledger) == {("foreign memory", None): 1000}
    assert "3.9 KiB more is in no figure of the device" in (row_of(ledger, "foreign memory").detail or "")


def test_an_allocator_without_segments_still_has_requested_rows() -> None:
    ledger = gpu_ledger("cuda:0", None, [storage(1 << 30, 600, "parameter")], use_of(1000, own=1000), 300)
    assert sums(ledger) == {
        ("requested", "parameter"): 600,
        ("context", None): 300,
        ("outside the allocator", None): 100,
    }


def test_a_disagreement_is_a_row_and_not_hidden() -> None:
    ledger = gpu_ledger("cuda:0", [make_segment(4096, ("free", 512, 0))], [], use_of(500))
    assert sums(ledger) == {("releasable", None): 512, ("unexplained", None): -12}


def test_other_devices_take_no_part() -> None:
    there = make_segment(4096, ("active", 512, 512), device=1)
    elsewhere = msgspec.structs.replace(storage(4096, 512), device="cuda:1")
    assert sums(gpu_ledger("cuda:0", [there], [elsewhere], use_of(100))) == {
        ("outside the allocator", None): 100
    }
    assert sums(gpu_ledger("cuda:1", [there], [elsewhere], use_of(512))) == {("requested", "variable"): 512}


def test_recorded_fragmentation_is_stranded_by_the_kept_blocks() -> None:
    """An H200's allocator after `empty_cache()`, with fourteen small blocks kept by the script."""
    segments = parse_segments(json.loads((DATA / "segments_fragmentation.json").read_text()), 0)
    totals = segment_totals(segments)
    assert (totals.allocated, totals.reserved) == (493_806_592, 1_098_907_648)
    assert totals.releasable == 0
    kept = [b for s in segments for b in s.blocks if b.site == "train.py:82 in per"]
    assert len(kept) == 14
    worst = stranded_segments(segments)
    assert [segment.stranded for segment in worst[:2]] == [425_721_856, 50_331_648]
    assert set(worst[1].pins) <= set(kept)
    ledger = gpu_ledger("cuda:0", segments, [], use_of(totals.reserved + 600 * MIB), 500 * MIB)
    assert sums(ledger)["stranded", None] == totals.stranded == 605_101_056
    # 2 x 32 MiB of cuBLAS and 1 MiB of cuBLASLt, as frames in the recording bear out.
    assert sums(ledger)["requested", ledger_module.CUBLAS] == 65 * MIB
