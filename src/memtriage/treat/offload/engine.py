"""The work on tiles: gradients down, the step on the host, weights up. In the optimizer's own thread."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from memtriage.treat.offload.bucket import Bucket, Tile, in_tile, on_device, on_host
from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.kernel import Hyper, Operands, Scaling, adamw
from memtriage.treat.offload.ring import Ring, Slot

_log = logging.getLogger(__name__)


class Engine:
    """What one optimizer does with its ring.

    Attributes:
        ring: the pinned tiles.
        exchange: the partition over a process group, or None.
        changing: whether anything has been written that a repeated call would not write again; set to False
            by whoever wants to know.
    """

    def __init__(self, ring: Ring, exchange: Exchange | None) -> None:
        self.ring = ring
        self.exchange = exchange
        self.changing = False

    def adopt(self, bucket: Bucket) -> None:
        """Bring the masters in line with the weights on the device.

        A master that rounds to its weight keeps its low bits; where somebody else has written another weight
        (a checkpoint was loaded), or no master is known yet, the weight becomes the master.
        """
        dtype = bucket.weight_dtype

        def fetch(tile: Tile, slot: Slot) -> None:
            slot.fetch(bucket.lane, in_tile(slot.down(dtype), tile), on_device(bucket.weights, tile))

        def finish(tile: Tile, slot: Slot) -> None:
            slot.arrived()
            slot.vacated()
            arrived = in_tile(slot.down(dtype), tile)
            rounded = in_tile(slot.up(dtype), tile)
            masters = on_host(bucket.masters, tile)
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

        self.ring.run(bucket.tiles, fetch, finish)
        for one in bucket.residents:
            one.saw()

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

        def finish(tile: Tile, slot: Slot) -> None:
            slot.arrived()
            arrived = in_tile(slot.down(self._travels_as(bucket)), tile)
            kept = on_host(bucket.kept_gradients, tile)
            self.changing = True
            for part, target, source in zip(tile.parts, kept, arrived, strict=True):
                if bucket.residents[part.index].has_gradient:
                    target.add_(source)
                else:
                    target.copy_(source)

        self.ring.run(bucket.tiles, lambda tile, slot: self._fetch_gradients(bucket, tile, slot), finish)
        for one in bucket.residents:
            one.has_gradient = True

    def step(self, bucket: Bucket, hyper: Hyper, scaling: Scaling, *, upload: bool = True) -> None:
        """Take the step for all parameters of the bucket.

        Args:
            bucket: with gradients on the device, or else taken from the host.
            hyper: the group's settings.
            scaling: what the gradients go through first.
            upload: whether the new weights go up tile by tile, or stay until `upload`.
        """
        residents = bucket.residents
        numbers = [one.step + 1 for one in residents]

        def fetch(tile: Tile, slot: Slot) -> None:
            if bucket.gradients:
                self._fetch_gradients(bucket, tile, slot)

        def finish(tile: Tile, slot: Slot) -> None:
            slot.arrived()
            self.changing = True
            gradients = self._usable_gradients(bucket, tile, slot, scaling)
            operands = Operands(
                masters=on_host(bucket.masters, tile),
                gradients=gradients,
                exp_avgs=on_host(bucket.exp_avgs, tile),
                exp_avg_sqs=on_host(bucket.exp_avg_sqs, tile),
                steps=[numbers[one.index] for one in tile.parts],
            )
            if tile.parts:  # a rank may have none of a small parameter
                adamw(operands, hyper, self.ring.moments)
            if upload:
                self._send_weights(bucket, tile, slot)

        self.ring.run(bucket.tiles, fetch, finish)
        for one, number in zip(residents, numbers, strict=True):
            one.step.copy_(number)
            one.has_gradient = False

    def upload(self, bucket: Bucket) -> None:
        """Write the masters, rounded to the weights' type, to the device."""
        self.changing = True
        self.ring.run(
            bucket.tiles,
            lambda tile, slot: None,
            lambda tile, slot: self._send_weights(bucket, tile, slot),
        )

    def _travels_as(self, bucket: Bucket) -> torch.dtype:
        if self.exchange is not None and not bucket.reduced:
            return bucket.weight_dtype
        return bucket.gradients[0].dtype

    def _fetch_gradients(self, bucket: Bucket, tile: Tile, slot: Slot) -> None:
        down = slot.down(self._travels_as(bucket))
        if self.exchange is not None and not bucket.reduced:
            mine = self.exchange.reduce(bucket.lane, tile.pieces, bucket.residents, bucket.gradients)
            slot.fetch(bucket.lane, [down[: mine.numel()]], [mine])
        else:
            slot.fetch(bucket.lane, in_tile(down, tile), on_device(bucket.gradients, tile))

    def _usable_gradients(self, bucket: Bucket, tile: Tile, slot: Slot, scaling: Scaling) -> list[Tensor]:
        """The tile's gradients as float32, scaled."""
        if not bucket.gradients:
            kept = on_host(bucket.kept_gradients, tile)
            for one in kept:
                scaling.apply(one)
            return kept
        buffer = slot.down(self._travels_as(bucket))[: tile.used]
        if buffer.dtype != torch.float32:
            # The gaps between parts are converted along with them: one call instead of one a part.
            buffer = self.ring.gradient[: tile.used].copy_(buffer)
        scaling.apply(buffer)
        return in_tile(buffer, tile)

    def _send_weights(self, bucket: Bucket, tile: Tile, slot: Slot) -> None:
        slot.vacated()
        up = slot.up(bucket.weight_dtype)
        rounded = in_tile(up, tile)
        if rounded:
            torch._foreach_copy_(rounded, on_host(bucket.masters, tile))
        if self.exchange is None:
            slot.send(bucket.lane, on_device(bucket.weights, tile), rounded)
            return
        mine = self.exchange.room_to_send(bucket.lane, bucket.weight_dtype)
        slot.send(bucket.lane, [mine[: tile.used]], [up[: tile.used]])
        self.exchange.spread(bucket.lane, tile.pieces, bucket.residents, mine, bucket.weights)
