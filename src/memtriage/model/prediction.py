"""What `memtriage predict` says about a training step that has not run yet (schema 1)."""

from __future__ import annotations

from typing import Final

import msgspec

HOST_PEAK: Final = "peak"
"""Key of `Prediction.host` for the sum of the classes."""
EARLIER: Final = " of an earlier step"
"""End of the phase of what was made before the step of the peak."""


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


class PeakRow(msgspec.Struct, kw_only=True):
    """Bytes at the instant of the peak that have one owner, belong to one module, and come from one line.

    Attributes:
        owner: as in `Prediction.by_owner`.
        module: path of the module, with positions in lists folded into `[*]`, e.g. `model.layers[*].mlp`. For
            a parameter, its gradient and its states it is the module that has the parameter, for all else the
            one that made it; None if no module did.
        site: `file.py:line in function` that made them: the innermost line of the program, or of a library
            other than torch where the program has none; None if unknown.
        phase: in which they were made: `build`, `forward`, `backward` or `optimizer`; `of an earlier step`
            follows if that was not the step of the peak, except for what is meant to stay.
        bytes: requested bytes; for `rounding`, what the blocks have beyond that.
        blocks: number of blocks; 0 for `rounding`.
        operator: the operator that made the largest part, e.g. `aten::mm`; None for `rounding`.
    """

    owner: str
    module: str | None
    site: str | None = None
    phase: str | None = None
    bytes: int
    blocks: int
    operator: str | None


class RankPeaks(msgspec.Struct, kw_only=True):
    """Ranks of a job with the same peaks, in bytes.

    Attributes:
        ranks: their numbers.
        peak_allocated, peak_reserved: as in `Prediction`.
    """

    ranks: list[int]
    peak_allocated: int
    peak_reserved: int


class HorizonPoint(msgspec.Struct, kw_only=True):
    """The allocator's counters in one step of a run with unlimited memory, in bytes.

    Attributes:
        step: counted from 1.
        peak_allocated, peak_reserved: highest values in the step.
        stranded: free bytes after the step that could not go back to the driver.
    """

    step: int
    peak_allocated: int
    peak_reserved: int
    stranded: int


class HorizonVariant(msgspec.Struct, kw_only=True):
    """The same run with one thing changed.

    Attributes:
        name: what is changed: a setting of the allocator, the batches, or their order.
        peak_reserved, full_at: as in `Horizon`.
    """

    name: str
    peak_reserved: int
    full_at: int | None


class Horizon(msgspec.Struct, kw_only=True):
    """A run of many steps whose batches differ. Sizes are bytes, steps count from 1.

    Attributes:
        steps: how many were simulated.
        peak_reserved: most bytes of segments in any step, with unlimited memory.
        peak_allocated: most bytes of live blocks in any step.
        allocated_p50, allocated_p99, allocated_p999: half, 99 % and 99.9 % of the steps have at their peak at
            most so many bytes of live blocks; with unlimited memory.
        peak_step: the first step that reserves `peak_reserved`.
        peak_shape: its input.
        full_at: the first step in which an allocation fails, although cached blocks were returned, if the
            allocator has `memory`; 0 if that is while the model is built; None if every step runs.
        full_shape: the input of that step.
        full_operator: the operator whose allocation fails, e.g. `aten::mm`.
        full_asked: bytes that it requests.
        flushed_at: the first step in which cached blocks are returned for lack of memory.
        memory: bytes that the allocator can have: those of the GPU less what is outside, or the limit.
        shapes: number of distinct inputs.
        error: five inputs were both derived and traced; this is the largest relative difference of the bytes
            requested at the step's peak. None if every input was traced.
        course: some steps of the run, including those in which more is reserved than before.
        variants: what other settings, inputs and orders would give; empty if trying them takes too long.
    """

    steps: int
    peak_reserved: int
    peak_allocated: int
    allocated_p50: int
    allocated_p99: int
    allocated_p999: int
    peak_step: int
    peak_shape: str
    full_at: int | None
    full_shape: str | None
    full_operator: str | None
    full_asked: int | None
    flushed_at: int | None
    memory: int
    shapes: int
    error: float | None
    course: list[HorizonPoint]
    variants: list[HorizonVariant]


class HostCourse(msgspec.Struct, kw_only=True):
    """The host memory of one rank, in bytes.

    Attributes:
        stretches: one for each part of the program between two collectives: resident bytes by class at the
            part's peak, and their sum as `peak`.
        shared: pages of libraries, which the processes of a node share.
        launcher: what `torchrun` needs in addition to its ranks.
    """

    stretches: list[dict[str, int]]
    shared: int
    launcher: int


class Prediction(msgspec.Struct, kw_only=True):
    """A predicted peak. Sizes are bytes.

    Attributes:
        peak_allocated: most bytes of live blocks in the last traced step; for a script, in any step after the
            first, because its steps may differ.
        peak_reserved: most bytes of segments in the same steps.
        peak_phase: the phase at the instant of `peak_allocated`: `forward`, `backward` or `optimizer`.
        by_owner: bytes by owner at that instant; they sum to `peak_allocated`. `activation` is what forward
            made and backward will need, `temporary` what lives within a phase, `kept` what is older than
            the first step and none of the model's, `workspace` what kernels and libraries keep for
            themselves, `rounding` what blocks have beyond the requested bytes.
        outside_allocator: bytes that the process has on the device outside its segments.
        steps: every traced step; the first one begins without the optimizer's states.
        seconds: time that the prediction took.
        notes: what had to be assumed.
        cudnn_trials_bound: only if cuDNN chooses convolutions by trial (`cudnn.benchmark`): upper bound of
            allocated and reserved bytes during its trials, in the first call of each shape. The peaks do not
            include them.
        compile_trials: only if kernels are compiled or tuned: most bytes that Inductor or `triton.autotune`
            held at once for timing kernels, in the step that does it. The peaks of that step include them.
        peak_table: the instant of the peak by owner, module, line and phase, largest first; sums to
            `peak_allocated`. Always in JSON, otherwise only when asked for.
        other_peaks: the same for the highest instants of the step's other phases, by phase.
        context: what the figures depend on besides the program: versions, the GPU, the allocator's settings,
            arguments, and the inputs of its models. Both only with `peak_table`.
        horizon: a run of many steps. Only when asked for.
        host: resident bytes of the process and its workers at their peak, by class; `peak` is their sum.
            Only when asked for.
        host_node: the same for a node. Only when asked for.
        ranks: all ranks of the job, those that reserve most first; the other fields are those of the first
            one. Only when asked for.
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
    cudnn_trials_bound: int | msgspec.UnsetType = msgspec.UNSET
    compile_trials: int | msgspec.UnsetType = msgspec.UNSET
    peak_table: list[PeakRow] | msgspec.UnsetType = msgspec.UNSET
    other_peaks: dict[str, list[PeakRow]] | msgspec.UnsetType = msgspec.UNSET
    context: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    horizon: Horizon | msgspec.UnsetType = msgspec.UNSET
    host: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    host_node: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    ranks: list[RankPeaks] | msgspec.UnsetType = msgspec.UNSET


class RankPrediction(msgspec.Struct, kw_only=True):
    """What tracing one rank gives.

    Attributes:
        prediction: the prediction of this rank.
        host: what the figures of its node need; None unless the host is asked for.
        sent: numbers that it broadcast as rank 0, by process group, in order.
        missed: whether it should have received such numbers, but had none.
    """

    prediction: Prediction
    host: HostCourse | None = None
    sent: dict[str, list[list[int] | None]]
    missed: bool

    @property
    def notes(self) -> list[str]:
        """The prediction's notes."""
        return self.prediction.notes
