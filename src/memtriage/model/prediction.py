"""What `memtriage predict` says of a training step that has not run yet (schema 1)."""

from __future__ import annotations

import msgspec


class PredictedStep(msgspec.Struct, kw_only=True):
    """The allocator's counters of one step, in bytes.

    Attributes:
        peak_allocated: most bytes of live blocks, with rounding.
        peak_reserved: most bytes of segments.
        end_allocated: bytes of live blocks after the step.
    """

    peak_allocated: int
    peak_reserved: int
    end_allocated: int


class Prediction(msgspec.Struct, kw_only=True):
    """A predicted peak. Sizes are bytes.

    Attributes:
        peak_allocated: most bytes of live blocks in the last traced step.
        peak_reserved: most bytes of segments in it.
        peak_phase: the phase of the instant of `peak_allocated`: `forward`, `backward` or `optimizer`.
        by_owner: what the bytes of that instant are; sums to `peak_allocated`. `activation` is what forward
            made and backward will need, `temporary` what lives within a phase, `workspace` what kernels and
            libraries keep for themselves, `rounding` what blocks have beyond what was asked for.
        outside_allocator: bytes that the process has on the device beside its segments.
        steps: every traced step; the first one lacks what the optimizer makes in it.
        seconds: time that the prediction took.
        notes: what had to be assumed.
    """

    schema: int = 1
    peak_allocated: int
    peak_reserved: int
    peak_phase: str
    by_owner: dict[str, int]
    outside_allocator: int
    steps: list[PredictedStep]
    seconds: float
    notes: list[str]
