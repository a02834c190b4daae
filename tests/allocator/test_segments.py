"""The simulator's segments as plain data."""

from __future__ import annotations

from tests.allocator.simulators import MIB, simulator

from memtriage.model.blocks import Block, BlockState, Segment

KIB = 1 << 10


def blocks(address: int, *described: tuple[int, int, BlockState]) -> tuple[Block, ...]:
    made = []
    for size, requested, state in described:
        made.append(Block(address=address, size=size, requested=requested, state=state))
        address += size
    return tuple(made)


def test_a_snapshot_has_every_segment_with_its_blocks_in_every_state() -> None:
    one = simulator(device=3)
    large = one.malloc(30 * MIB, stream=5, pool=(1, 0))
    live, waiting, used = one.malloc(1000), one.malloc(2000), one.malloc(3000)
    one.record_stream(waiting, 6)
    one.free(waiting)
    one.free(used)
    parts = [(1024, 1000, "active"), (2048, 2000, "awaiting"), (2 * MIB - 3072, 0, "free")]
    assert live.address < large.address
    assert one.snapshot() == (
        Segment(
            device=3, address=live.address, size=2 * MIB, stream=0, pool=(0, 0), expandable=False,
            blocks=blocks(live.address, *parts),
        ),
        Segment(
            device=3, address=large.address, size=30 * MIB, stream=5, pool=(1, 0), expandable=False,
            blocks=blocks(large.address, (30 * MIB, 30 * MIB, "active")),
        ),
    )  # fmt: skip


def test_of_an_expandable_segment_every_mapped_range_is_one() -> None:
    one = simulator("expandable_segments:True", device_memory=160 * MIB)
    first, hole, last = one.malloc(20 * MIB), one.malloc(40 * MIB), one.malloc(15 * MIB)
    begin = first.address
    one.free(hole)
    one.empty_cache()
    assert one.snapshot() == tuple(
        Segment(
            device=0, address=address, size=20 * MIB, stream=0, pool=(0, 0), expandable=True, page=20 * MIB,
            blocks=blocks(address, *parts),
        )
        for address, parts in [
            (begin, [(20 * MIB, 20 * MIB, "active")]),
            (last.address, [(15 * MIB, 15 * MIB, "active"), (5 * MIB, 0, "free")]),
        ]
    )  # fmt: skip
    assert last.address == begin + 60 * MIB
