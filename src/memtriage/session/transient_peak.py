"""How much memory comes and goes between two marks: the room that a step needs beyond what stays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from memtriage.observe.counters import Reading

_RISES: Final = 64
"""So many rises of the peak are remembered: what only the beginning needed does not count for ever."""


class TransientPeak:
    """Follows the allocator's peak from mark to mark.

    Only a stretch in which the peak rises tells what it needed: where memory leaks, that is nearly every one.
    What a stretch leaves behind (gradients, the optimizer's state) is no part of what passes.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._rises: dict[str, deque[int]] = {}

    def at_mark(self, readings: Iterable[Reading]) -> None:
        """Takes in the counters of a mark."""
        for reading in readings:
            peak = None if reading.counters is None else reading.counters.peak_allocated
            if peak is None or reading.allocated is None:
                continue
            before = self._before.get(reading.device)
            self._before[reading.device] = reading.allocated, peak
            if before is None:
                continue
            allocated_before, peak_before = before
            # A lower peak than before: the program has reset it, and it is of what came since.
            if peak != peak_before:
                passed = max(0, peak - max(allocated_before, reading.allocated))
                self._rises.setdefault(reading.device, deque(maxlen=_RISES)).append(passed)

    def most(self) -> dict[str, int]:
        """The most that came and went, in bytes, by device; devices whose peak has not risen are left out."""
        return {device: max(rises) for device, rises in self._rises.items()}
