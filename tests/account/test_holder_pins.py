"""A tiny holder can pin a large segment: told from segments alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.gpu_ledger import releasable_in
from memtriage.account.holder_pins import pinned_by, without
from memtriage.model.blocks import DEFAULT_POOL, Block, BlockState, Segment
from memtriage.model.holders import SegmentPinning

MIB = 1 << 20
BASE = 1 << 30


def segment(
    *blocks: tuple[int, BlockState], page: int | None = None, pool: tuple[int, int] = (0, 0)
) -> Segment:
    """A segment at `BASE` of blocks of so many MiB."""
    made, at = [], BASE
    for mib, state in blocks:
        requested = 0 if state == "free" else mib * MIB
        made.append(Block(address=at, size=mib * MIB, requested=requested, state=state))
        at += mib * MIB
    return Segment(
        device=0, address=BASE, size=at - BASE, stream=0, pool=pool, expandable=page is not None,
        blocks=tuple(made), page=page,
    )  # fmt: skip


def at(mib: int, device: str = "cuda:0") -> tuple[str, int, int]:
    return (device, BASE + mib * MIB, 512)


def test_one_small_block_pins_its_whole_segment_and_lets_it_go() -> None:
    one = segment((1, "active"), (19, "free"))
    assert pinned_by([one], [at(0)]) == SegmentPinning(segments=1, nbytes=20 * MIB, releasable=20 * MIB)


def test_segment_with_other_live_blocks_stays_pinned() -> None:
    one = segment((1, "active"), (18, "free"), (1, "active"))
    assert pinned_by([one], [at(0)]) == SegmentPinning(segments=1, nbytes=20 * MIB, releasable=0)
    assert pinned_by([one], [at(0), at(19)]).releasable == 20 * MIB


def test_of_an_expandable_segment_whole_pages_count() -> None:
    one = segment((3, "active"), (5, "free"), (2, "active"), page=2 * MIB)
    # pages 0 and 1 hold the first block; page 1 is shared with the free one; page 4 with the last
    assert pinned_by([one], [at(0)]) == SegmentPinning(segments=1, nbytes=4 * MIB, releasable=4 * MIB)


def test_what_awaits_a_stream_still_pins() -> None:
    one = segment((1, "active"), (1, "awaiting"), (18, "free"))
    assert pinned_by([one], [at(0)]).releasable == 0
    assert pinned_by([one], [at(0), at(1)]).releasable == 20 * MIB


def test_a_private_pool_keeps_its_segments() -> None:
    assert pinned_by([segment((1, "active"), pool=(1, 0))], [at(0)]) == SegmentPinning(
        segments=1, nbytes=MIB, releasable=0
    )


def test_other_devices_freed_blocks_and_other_memory_pin_nothing() -> None:
    one = segment((1, "free"), (1, "active"))
    nothing = SegmentPinning(segments=0, nbytes=0, releasable=0)
    assert pinned_by([one], [at(1, "cuda:1"), at(1, "cpu"), at(0), at(2), at(7), at(-3)]) == nothing


def test_an_address_in_the_middle_of_a_block_is_that_block() -> None:
    assert pinned_by([segment((4, "active"))], [at(3)]).segments == 1


states = st.sampled_from(["active", "awaiting", "free"])
segments = st.lists(st.tuples(st.integers(1, 8), states), min_size=1, max_size=12)


@given(blocks=segments, page=st.sampled_from([None, 2 * MIB]), data=st.data())
def test_freeing_never_makes_less_releasable(
    blocks: list[tuple[int, BlockState]], page: int | None, data: st.DataObject
) -> None:
    one = segment(*blocks, page=page)
    live = [("cuda:0", block.address, 1) for block in one.blocks if block.state != "free"]
    chosen = data.draw(st.lists(st.sampled_from(live), unique=True)) if live else []
    some, every = pinned_by([one], chosen), pinned_by([one], live)
    assert 0 <= some.releasable <= every.releasable
    assert some.nbytes <= every.nbytes <= one.size
    freed = without(one, {address for _, address, _ in live})
    assert sum(block.size for block in freed.blocks) == one.size
    assert len(freed.blocks) == 1
    whole = one.size if page is None else one.size // page * page
    assert releasable_in(freed) in (whole, one.size)
    assert one.pool == DEFAULT_POOL
