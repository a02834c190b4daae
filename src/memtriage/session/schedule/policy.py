"""The thresholds of the census schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """When censuses are taken.

    Attributes:
        baseline_step: the run's first census, with the ledger, is taken at the end of this step: optimizer
            state exists by then.
        step_gap: steps between the two censuses of an investigation: enough to tell a trend from one odd
            step, and few enough to finish within a short run.
        seconds_gap: the same where no steps are seen, in seconds.
        first_microbatch, second_microbatch: micro-batches of a step at which the two are taken within it.
        tries_within_steps: investigations within steps, in a run. What rises in every step and is gone at its
            end (a pipeline that fills) would otherwise be looked at in each.
        census_share: after a false alarm on a scale, the next investigation on it waits until censuses have
            taken no more than this share of the run.
        verify_at_most_s: a third census is left out when the censuses so far took longer.
        kept: concluded investigations that are remembered; those of long runs that keep growing repeat.
    """

    baseline_step: int = 3
    step_gap: int = 4
    seconds_gap: int = 8
    first_microbatch: int = 4
    second_microbatch: int = 8
    tries_within_steps: int = 3
    census_share: float = 0.04
    verify_at_most_s: float = 30.0
    kept: int = 8


SCHEDULE: Final = SchedulePolicy()
