"""The pipeline over the ring: fetches run ahead, tiles finish in order, no slot has two tiles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.offload.lanes import lane_to
from memtriage.treat.offload.ring import Ring, Slot


@given(st.integers(0, 12), st.integers(1, 5))
def test_tiles_go_through_in_order_with_fetches_ahead(tiles: int, depth: int) -> None:
    ring = Ring(64, depth, pin=False, moments=False)
    taken: dict[int, Slot] = {}
    fetched: list[int] = []
    finished: list[int] = []

    def fetch(tile: int, slot: Slot) -> None:
        assert slot not in taken.values()
        taken[tile] = slot
        fetched.append(tile)

    def finish(tile: int, slot: Slot) -> None:
        # As many tiles as there are slots are under way by now, but at the end.
        assert len(fetched) == min(tiles, len(finished) + depth)
        assert taken.pop(tile) is slot
        finished.append(tile)

    ring.run(range(tiles), fetch, finish)
    assert fetched == finished == list(range(tiles))


def test_a_slot_carries_both_ways_at_once_in_any_type() -> None:
    ring = Ring(64, 1, pin=False, moments=True)
    lane = lane_to(torch.device("cpu"))
    (slot,) = ring.slots
    device = [torch.arange(64.0), torch.arange(64.0).bfloat16(), torch.zeros(64, dtype=torch.bfloat16)]
    slot.fetch(lane, [slot.down(torch.float32)[:64]], [device[0]])
    slot.arrived()
    slot.vacated()
    slot.up(torch.bfloat16)[:64].copy_(slot.down(torch.float32)[:64])
    slot.send(lane, [device[2]], [slot.up(torch.bfloat16)[:64]])
    slot.vacated()
    assert torch.equal(device[2], device[1])
    assert torch.equal(slot.down(torch.float32)[:64], device[0])
    assert ring.nbytes == 64 * 4 * (2 + 3)
    assert not ring.pinned
    ring.close()
    ring.close()
