"""What `memtriage plan` says: the changes that make a training step fit a budget (schema 1)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memtriage.model.explanation import Maths

RungOutcome = Literal["not needed", "no help", "does not apply", "fails", "on request"]
"""What became of a rung that is not part of the plan."""


class PlannedPeak(msgspec.Struct, kw_only=True):
    """The peak of the program with some changes, over all traced steps. Sizes are bytes.

    Attributes:
        allocated: most bytes of live blocks.
        reserved: most bytes of segments, with no limit set.
        needs: device memory that the process must be allowed to use so that the program runs: the smallest
            limit at which the simulated allocator, which flushes its cache if it must, does not run out of
            memory, plus what is outside the allocator.
        phase: the phase at the instant of `allocated`.
        by_owner: bytes by owner at that instant.
    """

    allocated: int
    reserved: int
    needs: int
    phase: str
    by_owner: dict[str, int]


class PlanStep(msgspec.Struct, kw_only=True):
    """A change of the plan.

    Attributes:
        rung: its name on the ladder.
        playbook: the entry, M1 to M21.
        action: what is changed.
        saves: bytes by which it lowers `needs`, after the changes before it; negative if it only pays
            together with a later one.
        after: the peak with this change and those before it.
        slowdown: additional computation as a share of what it was before, 0.3 for 30 %; None if not counted.
        speed: what is known of the speed, with its source.
        maths: what it does to the result.
        maths_note: exceptions; None if there are none.
        simulated_by: what was simulated instead of the change; None if the change itself was.
        code: what to write, by framework: `torch`, and `trainer`, `accelerate`, `lightning` if it differs.
    """

    rung: str
    playbook: str
    action: str
    saves: int
    after: PlannedPeak
    slowdown: float | None
    speed: str
    maths: Maths
    maths_note: str | None
    simulated_by: str | None
    code: dict[str, str]


class PassedOver(msgspec.Struct, kw_only=True):
    """A rung that is not part of the plan.

    Attributes:
        rung: its name on the ladder.
        playbook: the entry, M1 to M21.
        outcome: what became of it.
        why: in words; for a rung that could apply after an addition to the program, what to add.
        saves: bytes that it saved when tried; None if it was not tried.
    """

    rung: str
    playbook: str
    outcome: RungOutcome
    why: str
    saves: int | None


class Cheaper(msgspec.Struct, kw_only=True):
    """The next cheaper set of changes, which does not fit.

    Attributes:
        actions: its changes; empty for the program as it is.
        needs: as in `PlannedPeak`.
        over_budget: bytes by which `needs` is above the budget; negative if it is within the margin.
    """

    actions: list[str]
    needs: int
    over_budget: int


class Plan(msgspec.Struct, kw_only=True):
    """The cheapest set of changes that fits a budget. Sizes are bytes.

    Attributes:
        budget: what the process may use of the device in all: the allocator's segments and what is outside it
            (context, kernels, libraries), as the driver counts it.
        margin: share of the budget that must stay free.
        fits: whether the program, with all steps of the plan, runs within the budget less the margin.
        short_by: bytes that are missing, margin included; 0 if it fits.
        outside_allocator: bytes of the budget that are outside the allocator.
        before: the peak of the program as it is.
        after: the peak with all steps.
        steps: the changes, in order of cost; empty where none is needed.
        next_cheaper: None where no change is needed, or nothing fits.
        passed_over: all other rungs.
        settings_only: only the allocator's settings were tried, because the program is a script.
        traces: how often the program was traced.
        seconds: time that the search took.
        notes: what had to be assumed.
    """

    schema: int = 1
    budget: int
    margin: float
    fits: bool
    short_by: int
    outside_allocator: int
    before: PlannedPeak
    after: PlannedPeak
    steps: list[PlanStep]
    next_cheaper: Cheaper | None
    passed_over: list[PassedOver]
    settings_only: bool = False
    traces: int
    seconds: float
    notes: list[str]


class SizedProgram(msgspec.Struct, kw_only=True):
    """What a program of some batch and length needs.

    Attributes:
        needs: as in `PlannedPeak`.
        keywords: for `batch` and `seq`, where there is one: whose keyword (`build` or `step`) sets it, its
            name, and its value by default.
        notes: what had to be assumed.
    """

    needs: int
    keywords: dict[str, tuple[str, str, int]] = {}
    notes: list[str] = []


class LargestSize(msgspec.Struct, kw_only=True):
    """The largest size that fits. Sizes are bytes.

    Attributes:
        batch, seq: samples of a micro-batch, and their length; None for the program's own.
        needs: what that needs.
        next: the next larger one, of what was searched, and `next_needs` what it needs; None if none was
            found that does not fit.
    """

    batch: int | None
    seq: int | None
    needs: int
    next: int | None
    next_needs: int | None


class Maximum(msgspec.Struct, kw_only=True):
    """The largest batch or length within a budget, as `memtriage plan --maximize --json` prints it.

    Attributes:
        budget: bytes, as in `Plan`.
        margin: part of the budget that stays free.
        maximize: what was searched: `batch`, `seq`, or both.
        found: one for what was searched; of both, one for each length. Empty if nothing fits.
        least_needs: what the smallest size needs that was tried.
        traces: how often the program was traced.
        seconds: time that the search took.
        notes: what had to be assumed.
    """

    schema: int = 1
    budget: int
    margin: float
    maximize: list[str]
    found: list[LargestSize]
    least_needs: int
    traces: int
    seconds: float
    notes: list[str]
