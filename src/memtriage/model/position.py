"""Where training stands, and the scales in which positions are counted."""

from __future__ import annotations

from typing import Literal

import msgspec

TrainingPhase = Literal["forward", "backward", "optimizer", "evaluation", "setup"]
Scale = Literal["step", "microbatch", "second"]
"""What the positions of censuses, and so rates of growth, are counted in."""


class TrainingPosition(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How far training has come at one instant, and what it was doing.

    Attributes:
        step: completed optimizer steps.
        microbatch: completed backwards of the step in work. After a step it stays at the whole step's count
            until the next backward completes. Backwards inside an optimizer's closure are not counted.
        backwards: completed backwards in all, without those of closures.
        microbatches_per_step: completed backwards of the last whole step; 0 before there was one.
        at_step_end: an optimizer step is complete and no backward has completed since.
        time_s: seconds since the watch began.
        phase: which part of training.
        grad_enabled: whether operations were recorded for backward; None where unknown.
        batch_elements: elements of the batch in work; None where unknown.
        largest_batch: elements of the largest batch that completed a backward; None where unknown.
    """

    step: int = 0
    microbatch: int = 0
    backwards: int = 0
    microbatches_per_step: int = 0
    at_step_end: bool = False
    time_s: float = 0.0
    phase: TrainingPhase = "setup"
    grad_enabled: bool | None = None
    batch_elements: int | None = None
    largest_batch: int | None = None

    @property
    def into_step(self) -> int:
        """Backwards completed since the last step; 0 right after it."""
        return 0 if self.at_step_end else self.microbatch

    @property
    def longest_batch(self) -> bool | None:
        """Whether the batch in work is larger than any before; None where sizes are unknown."""
        if self.batch_elements is None or self.largest_batch is None:
            return None
        return self.batch_elements > self.largest_batch

    def on(self, scale: Scale) -> float:
        """Return the position on a scale: steps, micro-batches of the step in work, or seconds.

        Steps and micro-batches are whole numbers; seconds are not rounded.
        """
        if scale == "step":
            return self.step
        return self.microbatch if scale == "microbatch" else self.time_s
