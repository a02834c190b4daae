"""Fragmentation that grows over a run: reserved rises more than the peak of allocated. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Track
from memtriage.model.findings import Finding
from memtriage.model.units import MIB, size
from memtriage.playbook.fragmentation import ENTRY, EXPANDABLE_FIX, FIX, WHY


@dataclass(frozen=True, slots=True)
class FragmentationPolicy:
    """When growing fragmentation is reported. It is what is reserved beyond the peak of allocated bytes.

    Attributes:
        warm_up: first steps to leave out: the optimizer makes its states, and libraries their buffers.
        steps: steps needed after these, so that each quarter of the time shows something.
        floor: bytes by which it must have risen: a few segments of 20 MiB always have some room.
        share: the same as a part of the peak: less is not worth a change of the program.
        quarter: a quarter of the time counts if it has at least this part of the whole rise.
        quarters: how many of the last three quarters must count. A single rise, such as that of the first
            evaluation, is not growth, nor is a rise that ends early.
    """

    warm_up: int = 3
    steps: int = 16
    floor: int = 64 * MIB
    share: float = 0.05
    quarter: float = 0.05
    quarters: int = 2


POLICY: Final = FragmentationPolicy()


@dataclass(frozen=True, slots=True)
class ReservedGrowth:
    """How a device's reserved memory grew beyond the peak. Sizes in bytes.

    Attributes:
        steps: first and last step.
        reserved: at these steps.
        peak: highest allocated bytes until these steps.
    """

    steps: tuple[int, int]
    reserved: tuple[int, int]
    peak: tuple[int, int]

    @property
    def beyond(self) -> int:
        """Bytes reserved at the end that were never allocated at once."""
        return self.reserved[1] - self.peak[1]

    @property
    def rise(self) -> int:
        """By how much `beyond` has risen."""
        return self.beyond - (self.reserved[0] - self.peak[0])


class ReservedCourse:
    """Reserved bytes and the peak of allocated bytes of one device over the steps, in bounded memory.

    Args:
        policy: when growth is reported.
    """

    def __init__(self, policy: FragmentationPolicy = POLICY) -> None:
        self._policy = policy
        self._reserved, self._peak = Track(policy.warm_up), Track(policy.warm_up)
        self._most = 0

    def add(self, step: int, reserved: int, peak: int) -> bool:
        """Add the counters at the end of a step; return whether more is reserved than a step before.

        Args:
            step: completed steps.
            reserved: bytes.
            peak: the allocator's highest allocated bytes; the program may have reset it since.
        """
        before = self._reserved.last
        self._most = max(self._most, peak)
        self._reserved.add(step, reserved)
        self._peak.add(step, self._most)
        return before is None or reserved > before[1]

    def growth(self) -> ReservedGrowth | None:
        """Return how reserved memory grew beyond the peak; None if it did not, or has stopped."""
        reserved, peak = self._reserved.points(), self._peak.points()
        policy = self._policy
        if self._reserved.last is None or len(reserved.at) < policy.steps:
            return None
        beyond = reserved.means - peak.means
        ends = [len(beyond) * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]
        whole = beyond[-1] - beyond[0]
        if whole < max(policy.floor, policy.share * self._most):
            return None
        if np.count_nonzero(np.diff(beyond[ends]) >= policy.quarter * whole) < policy.quarters:
            return None
        step, last = self._reserved.last
        return ReservedGrowth(
            (round(reserved.at[0]), round(step)),
            (round(reserved.means[0]), last),
            (round(peak.means[0]), self._most),
        )


def fragmentation_finding(
    device: str, growth: ReservedGrowth, pinned: str | None, compaction: str | None, expandable: bool
) -> Finding:
    """Make the finding of fragmentation that grows.

    Args:
        device: `cuda:N`.
        growth: its growth.
        pinned: in words, which blocks pin which segments; None if not known.
        compaction: in words, what compaction after a step would cost and free; None if not known.
        expandable: whether the allocator uses expandable segments already.
    """
    (first, last), (before, now) = growth.steps, growth.reserved
    evidence = [
        f"reserved rose from {size(before)} to {size(now)} between steps {first:,} and {last:,}, the most "
        f"that was allocated from {size(growth.peak[0])} to {size(growth.peak[1])}"
    ]
    return Finding(
        kind="fragmentation",
        device=device,
        bytes=growth.beyond,
        bytes_per_step=round(growth.rise / max(1, last - first)),
        mechanism=WHY,
        fix=FIX if expandable else f"{EXPANDABLE_FIX}; or {FIX}",
        playbook=ENTRY,
        step=last,
        evidence=[*evidence, *(line for line in (pinned, compaction) if line is not None)],
    )
