"""The work on tiles, in the optimizer's own threads: gradients down, the step on the host, weights up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from memtriage.treat.offload.arithmetic import Arithmetic
from memtriage.treat.offload.bucket import Bucket, Tile, in_tile, on_device, on_host
from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.kernel import Hyper, Operands, Scaling
from memtriage.treat.offload.pipeline import Job, Ring, TileSlot

_log = logging.getLogger(__name__)


class Engine:
    """What one optimizer does with its ring.

    Attributes:
        exchange: the partition over a process group, or None.
        changing: whether anything has been written that a repeated call would not write again. The caller
            sets it to False first.
    """

    def __init__(self, ring: Ring, arithmetic: Arithmetic, exchange: Exchange | None) -> None:
        self.ring = ring
        self.arithmetic = arithmetic
        self.exchange = exchange
        self.changing = False

    def adopt(self, bucket: Bucket) -> None:
        """Update the masters to the weights on the device.

        A master that rounds to its weight keeps its low bits. If something else has written another weight (a
        checkpoint was loaded), or there is no master yet, the weight becomes the master.
        """
        dtype = bucket.weight_dtype

        def fetch(tile: Tile, slot: TileSlot) -> None:
            slot.fetch(bucket.lane, in_tile(slot.down(dtype), tile), on_device(bucket.weights, tile))

        def compare(tile: Tile, slot: TileSlot) -> None:
            arrived = in_tile(slot.down(dtype), tile)
            rounded = in_tile(slot.up(dtype), tile)
            masters = on_host(bucket, "master", tile)
            for part, weight, own, master in zip(tile.parts, arrived, rounded, masters, strict=True):
                resident = bucket.residents[part.index]
                if not resident.known or dtype == torch.float32:
                    master.copy_(weight)
                    continue
                own.copy_(master)
                other = own.view(torch.int16) != weight.view(torch.int16)
                if other.any():
                    _log.info(
                        "%d weights of %s were changed outside the optimizer", int(other.sum()), resident.name
                    )
                    master[other] = weight[other].float()

        self.ring.run(bucket.tiles, fetch, lambda *where: self._calling(compare, *where), _nothing)
        for member in bucket.residents:
            member.saw()

    def reduce(self, bucket: Bucket) -> None:
        """Replace this rank's part of the gradients on the device by the sum over the ranks."""
        if self.exchange is None or bucket.reduced:
            return
        for tile in bucket.tiles:
            mine = self.exchange.reduce(bucket.lane, tile.pieces, bucket.residents, bucket.gradients)
            with bucket.lane.down():
                for target, source in zip(
                    on_device(bucket.gradients, tile), in_tile(mine, tile), strict=True
                ):
                    target.copy_(source)
        bucket.reduced = True

    def collect(self, bucket: Bucket) -> None:
        """Add the gradients on the device to those that stay on the host."""

        def add(tile: Tile, slot: TileSlot) -> None:
            arrived = _arrived_gradients(bucket, tile, slot)
            kept = on_host(bucket, "gradient", tile)
            self.changing = True
            for part, target, source in zip(tile.parts, kept, arrived, strict=True):
                if bucket.residents[part.index].has_gradient:
                    target.add_(source)
                else:
                    target.copy_(source)

        self.ring.run(
            bucket.tiles,
            lambda tile, slot: self._fetch_gradients(bucket, tile, slot),
            lambda *where: self._calling(add, *where),
            _nothing,
        )
        for resident in bucket.residents:
            resident.has_gradient = True

    def step(self, bucket: Bucket, hyper: Hyper, scaling: Scaling, *, upload: bool = True) -> None:
        """Take the step for all parameters of the bucket.

        Args:
            bucket: has the gradients on the device; otherwise the host's are used.
            upload: whether the new weights go up tile by tile, or only at `upload`.
        """
        residents = bucket.residents
        numbers = [resident.step + 1 for resident in residents]

        def fetch(tile: Tile, slot: TileSlot) -> None:
            if bucket.gradients:
                self._fetch_gradients(bucket, tile, slot)

        def prepare(tile: Tile, slot: TileSlot) -> Job:
            operands = Operands(
                masters=on_host(bucket, "master", tile),
                gradients=_arrived_gradients(bucket, tile, slot),
                exp_avgs=on_host(bucket, "exp_avg", tile),
                exp_avg_sqs=on_host(bucket, "exp_avg_sq", tile),
                steps=[numbers[part.index] for part in tile.parts],
                rounded=in_tile(slot.up(bucket.weight_dtype), tile) if upload else [],
            )
            job = self.arithmetic.stepping(operands, hyper, scaling)
            self.changing = True  # it is started next
            return job

        def finish(tile: Tile, slot: TileSlot) -> None:
            if upload:
                self._send_weights(bucket, tile, slot)

        self.ring.run(bucket.tiles, fetch, prepare, finish)
        for resident, number in zip(residents, numbers, strict=True):
            resident.step.copy_(number)
            resident.has_gradient = False

    def upload(self, bucket: Bucket) -> None:
        """Write the masters, rounded to the weights' type, to the device."""

        def rounding(tile: Tile, slot: TileSlot) -> None:
            self.changing = True
            rounded = in_tile(slot.up(bucket.weight_dtype), tile)
            if rounded:
                torch._foreach_copy_(rounded, on_host(bucket, "master", tile))

        self.ring.run(
            bucket.tiles,
            _nothing,
            lambda *where: self._calling(rounding, *where),
            lambda tile, slot: self._send_weights(bucket, tile, slot),
        )

    def close(self) -> None:
        """Release everything. No work may be running. Repeatable."""
        self.ring.close()
        self.arithmetic.close()
        if self.exchange is not None:
            self.exchange.close()

    def _calling(self, work: Callable[[Tile, TileSlot], None], tile: Tile, slot: TileSlot) -> Job:
        return self.arithmetic.calling(partial(work, tile, slot))

    def _fetch_gradients(self, bucket: Bucket, tile: Tile, slot: TileSlot) -> None:
        assert bucket.travels_as is not None
        down = slot.down(bucket.travels_as)
        if self.exchange is not None and not bucket.reduced:
            mine = self.exchange.reduce(bucket.lane, tile.pieces, bucket.residents, bucket.gradients)
            slot.fetch(bucket.lane, [down[: mine.numel()]], [mine])
        else:
            slot.fetch(bucket.lane, in_tile(down, tile), on_device(bucket.gradients, tile))

    def _send_weights(self, bucket: Bucket, tile: Tile, slot: TileSlot) -> None:
        up = slot.up(bucket.weight_dtype)
        if self.exchange is None:
            slot.send(bucket.lane, on_device(bucket.weights, tile), in_tile(up, tile))
            return
        mine = self.exchange.room_to_send(bucket.lane, bucket.weight_dtype)
        slot.send(bucket.lane, [mine[: tile.used]], [up[: tile.used]])
        self.exchange.spread(bucket.lane, tile.pieces, bucket.residents, mine, bucket.weights)


def _arrived_gradients(bucket: Bucket, tile: Tile, slot: TileSlot) -> list[Tensor]:
    """The gradients that came down, else those that are kept on the host."""
    if bucket.travels_as is None:
        return on_host(bucket, "gradient", tile)
    return in_tile(slot.down(bucket.travels_as), tile)


def _nothing(_: Tile, __: TileSlot) -> None:
    """For work that moves nothing in one direction."""
