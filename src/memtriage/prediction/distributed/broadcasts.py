"""Numbers that rank 0 broadcasts: recorded in its own trace, and received in those of other ranks.

Programs compare them (whether ranks agree), and read sizes and seeds from them. What a rank had before, such
as a placeholder of -1, would be another path than that of a real rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist

from memtriage.prediction.fake_cuda.tensors import true_device
from memtriage.prediction.operators import Args
from memtriage.prediction.values import KnownValues

BROADCAST: Final = "c10d::broadcast_"
LIMIT: Final = 1 << 16
"""Largest tensor whose numbers are recorded, in elements."""

Sent = Mapping[str, Sequence[Sequence[int] | None]]
"""By process group the numbers of each broadcast by rank 0, in order; None where they are not known."""


class Broadcasts:
    """The broadcasts by rank 0 in one trace.

    Args:
        received: what rank 0 sent in its own trace; None where it was not traced.

    Attributes:
        sent: what this rank sent, as rank 0.
        missed: whether this rank was to receive numbers, and rank 0 was not traced.
    """

    def __init__(self, received: Sent | None = None) -> None:
        self._received = received
        self._done: Counter[str] = Counter()
        self.sent: dict[str, list[list[int] | None]] = {}
        self.missed = False

    def follow(self, args: Args, values: KnownValues) -> None:
        """A broadcast was called: note what rank 0 sends, or write what this rank receives from it."""
        (tensor, *more), boxed, root = args[:3]
        name = dist.ProcessGroup.unbox(boxed).group_name
        group = dist.distributed_c10d._resolve_process_group(name)
        if more or dist.get_global_rank(group, root) != 0:
            return
        number = self._done[name]
        self._done[name] += 1
        if dist.get_rank() == 0:
            self.sent.setdefault(name, []).append(_numbers(tensor, values))
        elif _may_be_sent(tensor):
            if self._received is None:
                self.missed = True
            else:
                # Rank 0 may have ended its last step earlier.
                for numbers in self._received.get(name, ())[number : number + 1]:
                    _write(tensor, numbers, values)


def _may_be_sent(tensor: torch.Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return whole and tensor.numel() <= LIMIT


def _numbers(tensor: torch.Tensor, values: KnownValues) -> list[int] | None:
    known = tensor if true_device(tensor).type == "cpu" else values.of(tensor)
    if known is None or not _may_be_sent(tensor):
        return None
    numbers: list[int] = known.flatten().tolist()
    return numbers


def _write(tensor: torch.Tensor, numbers: Sequence[int] | None, values: KnownValues) -> None:
    if numbers is None or len(numbers) != tensor.numel():
        return
    received = torch.tensor(numbers, dtype=tensor.dtype, device="cpu").view(tensor.shape)
    known = tensor if true_device(tensor).type == "cpu" else values.of(tensor)
    if known is None:
        values.note(tensor, received)
    else:
        known.copy_(received)
