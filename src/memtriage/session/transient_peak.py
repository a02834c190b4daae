"""How much memory comes and goes between two marks: what a step needs in addition to what stays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from memtriage.observe.counters import Reading

_RISES: Final = 64
"""Rises of the peak that are kept, so that what only the beginning of a run needed is forgotten."""


class TransientPeak:
    """Follows the allocator's peak from mark to mark.

    The time between two marks only shows what it needed if the peak rises in it. While memory leaks, the peak
    rises nearly every time. What stays allocated (gradients, the optimizer's state) is not transient.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._rises: dict[str, deque[int]] = {}

    def at_mark(self, readings: Iterable[Reading]) -> None:
        """Take the counters of a mark."""
        for reading in readings:
            peak = None if reading.counters is None else reading.counters.peak_allocated
            if peak is None or reading.allocated is None:
                continue
            before = self._before.get(reading.device)
            self._before[reading.device] = reading.allocated, peak
            if before is None:
                continue
            allocated_before, peak_before = before
            # The peak is lower than before: the program has reset it since.
            if peak != peak_before:
                transient = max(0, peak - max(allocated_before, reading.allocated))
                self._rises.setdefault(reading.device, deque(maxlen=_RISES)).append(transient)

    def most(self) -> dict[str, int]:
        """Return the largest transient bytes by device, without devices whose peak has not risen."""
        return {device: max(rises) for device, rises in self._rises.items()}
