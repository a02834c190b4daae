"""What `memtriage predict` says of a training step that has not run yet (schema 1)."""

from __future__ import annotations

from typing import Final

import msgspec

HOST_PEAK: Final = "peak"
"""In `Prediction.host`: the sum of the classes."""


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
    """Bytes of the peak instant that have one owner and belong to one module.

    Attributes:
        owner: as in `Prediction.by_owner`.
        module: path of the module, positions in lists folded into `[*]`, e.g. `model.layers[*].mlp`: of a
            parameter, its gradient and its states the one that has it, of all else the one that made it.
            None for what no module made.
        bytes: asked for; of `rounding` what the blocks have beyond.
        blocks: how many; 0 for `rounding`.
        operator: the one that made the largest part, e.g. `aten::mm`; None for `rounding`.
    """

    owner: str
    module: str | None
    bytes: int
    blocks: int
    operator: str | None


class ComparedMark(msgspec.Struct, kw_only=True):
    """A mark of a recorded run and the same instant as predicted, in bytes; None where not recorded.

    Attributes:
        name: `backward` (its end) or `step` (the end of the optimizer's).
        step: counted from 1.
        recorded_step: the recorded step that is compared: the last one with the last predicted.
        allocated, reserved: as recorded.
        predicted_allocated, predicted_reserved: as predicted.
    """

    name: str
    step: int
    recorded_step: int
    allocated: int | None
    reserved: int | None
    predicted_allocated: int
    predicted_reserved: int


class ComparedOwner(msgspec.Struct, kw_only=True):
    """Bytes of one owner in a recorded ledger, and as predicted; None where the ledger cannot tell."""

    owner: str
    recorded: int | None
    predicted: int


class Against(msgspec.Struct, kw_only=True):
    """A prediction beside the record of a real run.

    Attributes:
        device: whose marks and ledger, e.g. `cuda:0`.
        marks: of the predicted steps.
        owners: the last ledger of the record, owner by owner; empty when there is none.
        instant: the predicted instant that the ledger is compared with: the one nearest to it in bytes, as
            a ledger does not say at which mark it was taken. None without a ledger.
        notes: what could not be compared.
    """

    device: str
    marks: list[ComparedMark]
    owners: list[ComparedOwner]
    instant: str | None
    notes: list[str]


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
    """The allocator's counters in one step of a run, in bytes, with all the memory that is wanted.

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
        name: what is changed: a setting of the allocator, or the batches after the first steps.
        peak_reserved, full_at: as in `Horizon`.
    """

    name: str
    peak_reserved: int
    full_at: int | None


class Horizon(msgspec.Struct, kw_only=True):
    """A run of many steps whose batches differ. Sizes are bytes, steps count from 1.

    Attributes:
        steps: how many were simulated.
        peak_reserved: most bytes of segments in any step, with all the memory that is wanted.
        peak_allocated: most bytes of live blocks in any step.
        peak_step: the first step that reserves `peak_reserved`.
        peak_shape: its input.
        full_at: the first step in which an allocation fails, even after cached blocks were given back, where
            the allocator has `memory`; 0 while the model is made; None where the run ends.
        full_shape: the input of that step.
        full_operator: the operator whose allocation fails, e.g. `aten::mm`.
        full_asked: bytes that it asks for.
        flushed_at: the first step in which cached blocks are returned for lack of memory.
        memory: bytes that the allocator can have: of the GPU without what is outside, or the limit.
        shapes: distinct inputs of all steps.
        error: of five inputs that were derived and traced, the largest relative difference of the bytes that
            the step asks for at its peak; None where every input was traced.
        course: some steps of the run, those among them in which more is reserved than before.
        variants: what other settings, inputs and orders would give; empty where trying them takes too long.
    """

    steps: int
    peak_reserved: int
    peak_allocated: int
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
    """The host's memory of one rank, in bytes.

    Attributes:
        stretches: resident bytes by class when they are most, and their sum as `peak`: of each part of the
            program between two collectives.
        shared: pages of libraries, which the processes of a node share.
        launcher: what `torchrun` needs beside its ranks.
    """

    stretches: list[dict[str, int]]
    shared: int
    launcher: int


class Prediction(msgspec.Struct, kw_only=True):
    """A predicted peak. Sizes are bytes.

    Attributes:
        peak_allocated: most bytes of live blocks in the last traced step; of a script in the steps after the
            first, which may differ.
        peak_reserved: most bytes of segments in the same.
        peak_phase: the phase of the instant of `peak_allocated`: `forward`, `backward` or `optimizer`.
        by_owner: what the bytes of that instant are; sums to `peak_allocated`. `activation` is what forward
            made and backward will need, `temporary` what lives within a phase, `workspace` what kernels and
            libraries keep for themselves, `rounding` what blocks have beyond what was asked for.
        outside_allocator: bytes that the process has on the device beside its segments.
        steps: every traced step; the first one lacks what the optimizer makes in it.
        seconds: time that the prediction took.
        notes: what had to be assumed.
        cudnn_trials_bound: only where cuDNN chooses convolutions by trial (`cudnn.benchmark`): bytes that its
            trials may take allocated and reserved to, in the first call of each shape. The peaks lack them.
        compile_trials: only where kernels are compiled or tuned: most bytes that Inductor or
            `triton.autotune` held at once for timing kernels, in the step that does it. The peaks
            of that step include them.
        peak_table: the instant of the peak by owner and module, largest first; sums to `peak_allocated`.
            Only when asked for.
        against: the same of a recorded run. Only when asked for.
        horizon: a run of many steps. Only when asked for.
        host: resident bytes of the process and its workers when they are most, by class; `peak` is their sum.
            Only when asked for.
        host_node: the same of a node. Only when asked for.
        ranks: all ranks of the job, those that reserve most first; the other fields are those of the first.
            Only when asked for.
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
    against: Against | msgspec.UnsetType = msgspec.UNSET
    horizon: Horizon | msgspec.UnsetType = msgspec.UNSET
    host: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    host_node: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    ranks: list[RankPeaks] | msgspec.UnsetType = msgspec.UNSET


class RankPrediction(msgspec.Struct, kw_only=True):
    """What tracing one rank gives.

    Attributes:
        prediction: of this rank.
        host: what the figures of its node need; None unless the host is asked for.
        sent: numbers that it broadcast as rank 0, by process group, in order.
        missed: whether it was to receive such numbers, which were not given.
    """

    prediction: Prediction
    host: HostCourse | None = None
    sent: dict[str, list[list[int] | None]]
    missed: bool

    @property
    def notes(self) -> list[str]:
        """The prediction's notes."""
        return self.prediction.notes
