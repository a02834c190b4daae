"""Training steps in a recording: from the optimizer's own spans, from its frames, or from what repeats.

What repeats is a step only if it has a backward or an optimizer in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memtriage.allocator.trace_columns import TraceColumns
from memtriage.model.recording import ALLOC, Annotation, Steps
from memtriage.snapshots.stacks import BACKWARD, FORWARD, NONE, OPTIMIZER, StackFacts, phase_codes

STEP_SPAN: Final = "Optimizer.step#"
"""How `torch.optim.Optimizer` names the span of its `step` (`profile_hook_step`)."""
PROFILER_SPAN: Final = "ProfilerStep#"
MIN_REPEATS: Final = 4
"""Times that something must recur to count as a step."""
REGULAR: Final = 0.75
"""Share of the allocations that must be in like intervals for a recurrence to be a step."""
TOLERANCE: Final = 0.02
"""How much the number of allocations may differ between like intervals."""


def find_steps(trace: TraceColumns, facts: Sequence[StackFacts], spans: Sequence[Annotation]) -> Steps:
    """The ends of the training steps of one device.

    Several optimizers, or one that steps its parameters within backward, make one step: what has no forward
    between it (no backward, where no forward is recognized) is one.

    Args:
        trace: its events.
        facts: what each stack of the recording says.
        spans: the recording's annotations.
    """
    allocs = np.flatnonzero(trace.kind == ALLOC)
    phases = phase_codes(facts)[trace.stack]
    for name in (STEP_SPAN, PROFILER_SPAN):
        times = sorted(
            span.end_us for span in spans if span.name.startswith(name) and span.end_us is not None
        )
        ends = np.searchsorted(trace.time_us, np.array(times, np.int64), side="right")
        if step_ends := _coalesced(ends[ends > 0], phases, allocs):
            return Steps(step_ends, "annotations")
    if step_ends := _coalesced(np.flatnonzero(phases == OPTIMIZER) + 1, phases, allocs):
        return Steps(step_ends, "optimizer frames")
    period = _period(trace.stack[allocs], allocs)
    if _train(period, phases, allocs):
        return Steps(period, "period")
    return Steps(repeats=len(period))


def _train(ends: Sequence[int], phases: NDArray[np.uint8], allocs: NDArray[np.int64]) -> bool:
    """Whether what lies between recurrences trains: the layers of a forward recur as regularly as steps."""
    kinds = phases[allocs]
    trains = (kinds == BACKWARD) | (kinds == OPTIMIZER)
    bounds = np.searchsorted(allocs, ends)
    backward, work = (np.diff(np.append(0, np.cumsum(which))[bounds]) > 0 for which in (trains, ~trains))
    return len(ends) > 1 and bool((backward & work).mean() >= REGULAR)


def settled(trace: TraceColumns, ends: Sequence[int]) -> tuple[int, ...]:
    """The ends of the steps, each moved behind the frees that follow it: gradients go with `zero_grad`.

    A step settles until something is allocated again. The last one has no successor, and what follows it may
    be the end of everything: it gets as many events as the others take.
    """
    allocs = np.flatnonzero(trace.kind == ALLOC)
    at = np.asarray(ends, np.int64)
    following = np.append(allocs, len(trace))[np.searchsorted(allocs, at)]
    if len(at) > 1:
        usual = int(np.median(following[:-1] - at[:-1]))
        following[-1] = min(following[-1], at[-1] + usual)
    return tuple(following.tolist())


def _coalesced(
    ends: NDArray[np.int64], phases: NDArray[np.uint8], allocs: NDArray[np.int64]
) -> tuple[int, ...]:
    """The last of the ends in each run without work between, when there are any."""
    for phase in (FORWARD, BACKWARD, NONE):
        work = allocs[phases[allocs] == phase]
        if len(work):
            break
    before = np.searchsorted(work, ends)
    last = np.append(before[1:] != before[:-1], True)[: len(ends)]
    return tuple(ends[last].tolist())


def _period(stacks: NDArray[np.int32], allocs: NDArray[np.int64]) -> tuple[int, ...]:
    """Where the rarest regular stack recurs.

    An allocation that comes back after a like number of others, nearly always, stands once in a loop. Inner
    loops are regular too, but interrupted by the rest of the step; of loops within loops the outermost wins.
    """
    order = np.argsort(stacks, kind="stable")
    bounds = np.flatnonzero(np.diff(stacks[order])) + 1
    best: NDArray[np.int64] | None = None
    for positions in np.split(order, bounds):
        if len(positions) < MIN_REPEATS or (best is not None and len(positions) >= len(best)):
            continue
        intervals = np.diff(positions)
        middle = np.median(intervals)
        regular = np.abs(intervals - middle) <= np.maximum(middle * TOLERANCE, 1)
        if middle > 1 and intervals[regular].sum() >= REGULAR * len(stacks):
            best = positions
    return () if best is None else tuple(allocs[best].tolist())
