"""A change to a program, and the rung of the ladder that offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memtriage.model.explanation import Maths
from memtriage.planning.facts import Facts
from memtriage.prediction.build import Build, Built, check_built


def unchanged(built: Built) -> Built:
    """The edit of a change that is in arguments or settings alone."""
    return built


@dataclass(frozen=True, slots=True)
class Change:
    """One way to take a rung.

    Attributes:
        action: what is changed; no two changes have the same.
        speed: what is known of the speed, with its source.
        maths: what it does to the result.
        code: what to write, by framework: `torch`, and others where it differs.
        edit: changes what `build` returned.
        build_arguments: keyword arguments for `build`.
        step_arguments: keyword arguments for `step`.
        conf: options of the allocator, as in `PYTORCH_CUDA_ALLOC_CONF`.
        primed: blocks are allocated and freed first, chosen for the program with the other changes.
        maths_note: exceptions to `maths`.
        simulated_by: what is simulated in its place.
        counts_work: whether the floating-point operations tell the slow-down.
        work_factor: a step of the changed program is this many times what is simulated of it.
        displaces: rungs whose place it takes.
        outermost: its edit comes after all others.
    """

    rung: str
    action: str
    speed: str
    maths: Maths
    code: Mapping[str, str]
    edit: Callable[[Built], Built] = unchanged
    build_arguments: Mapping[str, Any] = field(default_factory=dict)
    step_arguments: Mapping[str, Any] = field(default_factory=dict)
    conf: str = ""
    primed: bool = False
    maths_note: str | None = None
    simulated_by: str | None = None
    counts_work: bool = False
    work_factor: float = 1.0
    displaces: frozenset[str] = frozenset()
    outermost: bool = False

    @property
    def traced(self) -> bool:
        """Whether the changed program has another trace: not if only the allocator acts differently."""
        return not (self.conf or self.primed)


Changes = tuple[Change, ...]


Offer = tuple[Changes, ...] | str
"""What a rung has for a program: ways to take it, each from the mildest change to the one that saves most;
several where it is not known beforehand which saves most. Or why there are none, and what to add to the
program where that would help."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung of the ladder.

    Attributes:
        playbook: the entry, M1 to M21.
        offered: the offer for a program, or the only change there is.
        on_request: why it is only tried when asked for; empty where it always is.
        configures: its changes are of the allocator alone, so a script can take it as it is.
    """

    name: str
    playbook: str
    offered: Callable[[Facts], Offer | Change]
    on_request: str = ""
    configures: bool = False

    def offer(self, facts: Facts) -> Offer:
        """What it has for a program."""
        offered = self.offered(facts)
        return ((offered,),) if isinstance(offered, Change) else offered


def changed(build: Build, changes: Changes) -> Build:
    """The build function of the changed program."""

    def build_changed(device: Any) -> Any:
        arguments: dict[str, Any] = {}
        step_arguments: dict[str, Any] = {}
        for change in changes:
            arguments.update(change.build_arguments)
            step_arguments.update(change.step_arguments)
        built = check_built(build(device, **arguments))
        if step_arguments:
            step = built.step
            built = Built(built.model, built.optimizers, lambda: step(**step_arguments))
        for change in sorted(changes, key=lambda change: change.outermost):
            built = change.edit(built)
        return built.model, built.optimizers, built.step

    return build_changed
