"""The thresholds of censuses within a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class WithinStepPolicy:
    """When censuses are taken from micro-batch to micro-batch.

    Attributes:
        first: micro-batch of the first, where the step is long enough: gradients exist, and three rises show.
        censuses: taken in one step: three intervals.
        tries: investigations within steps, in a run. What rises in every step and is gone at its end (a
            pipeline that fills) would otherwise be looked at in each.
        kept: investigations that are remembered.
    """

    first: int = 4
    censuses: int = 4
    tries: int = 3
    kept: int = 8


WITHIN_STEP: Final = WithinStepPolicy()
