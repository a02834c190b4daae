"""The peak of a program with some changes: traced again, then given to the simulated allocator."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.priming import Blocks
from memtriage.allocator.priming_search import BRIEF, choose
from memtriage.allocator.settings import AllocatorSettings, join_conf, parse_conf
from memtriage.model.plan import PlannedPeak
from memtriage.planning.changes import Changes, changed
from memtriage.planning.facts import Facts, Observer
from memtriage.prediction.build import Build, Built
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.owners import owners_at
from memtriage.prediction.requests import requests_of
from memtriage.prediction.sandbox.child import report_progress
from memtriage.prediction.simulate import phase_at, replay
from memtriage.prediction.trace import Trace, trace
from memtriage.prediction.watch import TracedProgram

KEPT_TRACES: Final = 3
"""Traces that stay for another allocator setting: the last ones serve, and each may take tens of MB."""
FINENESS: Final = 2 << 20
"""`needs` is accurate to this many bytes: segments are multiples of it."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A program with some changes.

    Attributes:
        peak: its peak.
        fits: whether it runs within the limit.
        work: floating-point operations of a whole optimizer step.
        uncounted: operators that `work` lacks.
    """

    peak: PlannedPeak
    fits: bool
    work: float
    uncounted: frozenset[str]


def planned_peak(
    trace: Trace, settings: AllocatorSettings, kind: GpuKind, blocks: Blocks = ()
) -> PlannedPeak:
    """The peak of a traced program; `blocks` are the bytes of those that the allocator is primed with."""
    counters = replay(trace.recording, settings, kind.memory, trace.steps, primed=blocks)
    highest = max(counters, key=lambda counter: counter.peak_allocated)
    reserved = max(counter.peak_reserved for counter in counters)
    # The least limit may be more than was reserved without one: an empty_cache() lowered that.
    too_little, enough = highest.peak_allocated, reserved
    while not _runs(trace, settings, kind, blocks, enough):
        too_little, enough = enough, enough + enough // 8
    while enough - too_little > FINENESS:
        middle = (too_little + enough) // 2
        if _runs(trace, settings, kind, blocks, middle):
            enough = middle
        else:
            too_little = middle
    return PlannedPeak(
        allocated=highest.peak_allocated,
        reserved=reserved,
        needs=enough + kind.outside,
        phase=phase_at(trace.recording, highest.peak_event),
        by_owner=owners_at(trace, highest),
    )


def _runs(trace: Trace, settings: AllocatorSettings, kind: GpuKind, blocks: Blocks, limit: int) -> bool:
    # Where memory does not suffice for the blocks, a program is not primed.
    primed = blocks if sum(blocks) <= limit else ()
    try:
        replay(trace.recording, settings, kind.memory, trace.steps, limit, primed)
    except OutOfMemory:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Traced:
    trace: Trace
    work: float
    uncounted: frozenset[str]


class Evaluator:
    """Evaluates sets of changes to one program, each once.

    Args:
        build: the program; of a script only options of the allocator can be changed.
        conf: the allocator's options, as given; None for what the environment and the program set.
        limit: bytes that the allocator may reserve.
        world_size: GPUs of the job, of which this is the first.

    Attributes:
        traces: how often the program was traced.
        notes: what the traces had to assume.
    """

    def __init__(
        self,
        build: Build | TracedProgram,
        kind: GpuKind,
        version: tuple[int, int],
        conf: str | None,
        steps: int,
        limit: int,
        world_size: int = 1,
    ) -> None:
        self._build = build
        self._kind = kind
        self._version = version
        self._conf = conf
        self._steps = steps
        self._limit = limit
        self._world_size = world_size
        self._facts: Facts | None = None
        self._known: dict[tuple[str, ...], Evaluated] = {}
        self._traces: OrderedDict[tuple[str, ...], _Traced] = OrderedDict()
        self.traces = 0
        self.notes: dict[str, None] = {}

    def facts(self) -> Facts:
        """What the rungs must know of the program; traces it as it is. Of a script nothing is known.

        Raises:
            BuildError: it cannot be traced; the text says what to change.
        """
        if isinstance(self._build, TracedProgram):
            return Facts()
        if self._facts is None:
            observer = Observer()
            traced_program = self._traced((), observer)
            compiled = traced_program.trace.compile_trials is not None
            self._facts = replace(observer.facts(), compiled=compiled)
        return self._facts

    def conf(self) -> str:
        """The allocator's options; where none were given, those that the first trace finds."""
        if self._conf is None:
            self.facts()
            self._conf = self._traced(()).trace.conf
        return self._conf

    def of(self, changes: Changes) -> Evaluated:
        """The program with these changes, in this order.

        Raises:
            BuildError: it cannot be traced so.
        """
        key = tuple(change.action for change in changes)
        if key not in self._known:
            settings = parse_conf(join_conf(self.conf(), *(change.conf for change in changes)), self._version)
            traced_set = self._traced(changes)
            blocks: Blocks = ()
            if any(change.primed for change in changes) and not settings.expandable_segments:
                requests = requests_of(traced_set.trace, self._kind.memory)
                blocks = choose(requests, settings, BRIEF).blocks
            peak = planned_peak(traced_set.trace, settings, self._kind, blocks)
            fits = _runs(traced_set.trace, settings, self._kind, blocks, self._limit)
            self._known[key] = Evaluated(peak, fits, traced_set.work, traced_set.uncounted)
        return self._known[key]

    def _traced(self, changes: Changes, observer: Observer | None = None) -> _Traced:
        """The trace of a program; changes of allocator settings alone need no other."""
        key = tuple(change.action for change in changes if change.traced)
        known = self._traces.get(key)
        if known is not None and observer is None:
            self._traces.move_to_end(key)
            return known
        report_progress(f"in trace {self.traces + 1} of the program")
        work = Work()
        counted = [0]
        program = self._build
        if not isinstance(program, TracedProgram):
            program = self._watched(program, changes, observer, work, counted)
        recorded = trace(
            program, self._kind, self._version, self._steps, self._world_size, allocator_conf=self._conf
        )
        self.traces += 1
        self.notes.update(dict.fromkeys(recorded.notes))
        factor = math.prod(change.work_factor for change in changes)
        made = self._traces[key] = _Traced(recorded, counted[0] * factor, frozenset(work.uncounted))
        while len(self._traces) > KEPT_TRACES:
            self._traces.popitem(last=False)
        return made

    def _watched(
        self, build: Build, changes: Changes, observer: Observer | None, work: Work, counted: list[int]
    ) -> Build:
        """The changed build function, whose last step's operations are counted."""

        def watched(device: Any) -> Any:
            built = Built(*changed(build, changes)(device))
            if observer is not None:
                built = observer.observe(build, built)

            def step() -> None:
                before = work.flops
                with work:
                    built.step()
                counted[0] = work.flops - before

            return built.model, built.optimizers, step

        return watched


class Work(TorchDispatchMode):  # type: ignore[misc]
    """Adds up matrix products, convolutions and attention, by torch's own formulas.

    Attributes:
        flops: operations so far.
        uncounted: operators whose formula does not know the shapes that were met.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.uncounted: set[str] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is counted as it runs, not while it is compiled; asked by PyTorch."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            try:
                self.flops += formula(*args, **kwargs, out_val=result)
            except AssertionError:  # torch's formula of attention expects as many key heads as query heads
                self.uncounted.add(str(func._overloadpacket))
        return result
