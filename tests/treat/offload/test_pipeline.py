"""The ring: fetches run ahead, tiles finish in order, no slot has two tiles. The worker: how it closes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.offload.pipeline import Ring, TileSlot, Worker, lane_to


class Done:
    """A job that is done while it is waited for."""

    def __init__(self, *parts: Callable[[], None]) -> None:
        self.parts = parts

    def start(self) -> None:
        pass

    def wait(self) -> None:
        for part in self.parts:
            part()


@given(st.integers(0, 12), st.integers(1, 5))
def test_tiles_go_through_in_order_with_fetches_ahead(tiles: int, depth: int) -> None:
    ring = Ring(64, depth, pin=False)
    taken: dict[int, TileSlot] = {}
    fetched: list[int] = []
    computed: list[int] = []
    finished: list[int] = []

    def fetch(tile: int, slot: TileSlot) -> None:
        assert slot not in taken.values()
        taken[tile] = slot
        fetched.append(tile)

    def prepare(tile: int, slot: TileSlot) -> Done:
        assert taken[tile] is slot
        return Done(lambda: computed.append(tile))

    def finish(tile: int, slot: TileSlot) -> None:
        # As many tiles as there are slots are under way by now, but at the end.
        assert len(fetched) == min(tiles, len(finished) + depth)
        assert computed[: tile + 1] == list(range(tile + 1))
        assert taken.pop(tile) is slot
        finished.append(tile)

    ring.run(range(tiles), fetch, prepare, finish)
    assert fetched == computed == finished == list(range(tiles))
    ring.close()


@pytest.mark.parametrize("where", ["fetch", "prepare", "job", "finish"])
def test_after_a_failure_nothing_goes_on(where: str) -> None:
    ring = Ring(64, 3, pin=False)
    done: list[int] = []

    def fails(here: str, tile: int) -> None:
        if where == here and tile == 3:
            raise RuntimeError("no more")

    def prepare(tile: int, _: TileSlot) -> Done:
        fails("prepare", tile)
        return Done(lambda: fails("job", tile), lambda: done.append(tile))

    with pytest.raises(RuntimeError, match="no more"):
        ring.run(
            range(9), lambda tile, _: fails("fetch", tile), prepare, lambda tile, _: fails("finish", tile)
        )
    # What had been started was waited for: in the ring of three, one job follows that which failed.
    assert done == ([0, 1, 2, 4] if where == "job" else list(range(len(done))))
    assert len(done) >= 2
    ring.run(
        range(2), lambda *_: None, lambda tile, _: Done(lambda: done.append(100 + tile)), lambda *_: None
    )
    assert done[-2:] == [100, 101]
    ring.close()


def test_a_slot_carries_both_ways_at_once_in_any_type() -> None:
    ring = Ring(64, 1, pin=False)
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
    assert ring.nbytes == 2 * 64 * 4
    assert not ring.pinned
    ring.close()
    ring.close()


# Worker


def test_idle_worker_closes_at_once() -> None:
    worker = Worker()
    worker.run([], lambda: None)
    given_back: list[str] = []
    worker.close(lambda: given_back.append("all"))
    assert given_back == ["all"]


def test_close_waits_for_the_running_job_and_drops_the_rest() -> None:
    worker, begun, may_end, given_back = Worker(), threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def job() -> None:
        begun.set()
        may_end.wait()
        order.append("job")

    def give_back() -> None:
        order.append("given back")
        given_back.set()

    worker.submit([], job)
    dropped = worker.submit([], lambda: order.append("dropped"))
    begun.wait()
    worker.close(give_back)
    assert not given_back.is_set()
    may_end.set()
    assert given_back.wait(60)
    assert order == ["job", "given back"]
    assert dropped.cancelled()
