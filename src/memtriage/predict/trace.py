"""Runs a build function and its steps without a GPU, and records what they would allocate there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from memtriage.observe.hooks import TrainingHooks
from memtriage.predict.autocast import Autocast
from memtriage.predict.build import EXPECTED, BuildError, check_built, check_done, failure
from memtriage.predict.composites import Composites
from memtriage.predict.distributed.collectives import Collectives
from memtriage.predict.distributed.world import world_played
from memtriage.predict.interpreter import Interpreter
from memtriage.predict.lifetimes import Lifetimes, Recording
from memtriage.predict.machines import Machine
from memtriage.predict.notes import Notes
from memtriage.predict.overrides import Overrides
from memtriage.predict.personality import cuda_played
from memtriage.predict.places import Places
from memtriage.predict.scratch.table import Scratch
from memtriage.predict.tensors import CUDA, devices_played
from memtriage.predict.values import Values
from memtriage.predict.watch import Instant, Program, Watch

Build = Callable[[Any], Any]


@dataclass(slots=True)
class Trace:
    """What a trace found.

    Attributes:
        recording: allocations and frees.
        owners: of blocks, where known: `parameter`, `gradient`, `optimizer state`, `buffer`.
        notes: what was assumed.
        modules: paths of the modules that blocks belong to, where known.
        instants: where a watched run makes marks.
        communicators: process groups that NCCL makes a communicator for.
        held: bytes of DDP's first bucket, where another has replaced it.
    """

    recording: Recording
    owners: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    modules: dict[int, str] = field(default_factory=dict)
    instants: list[Instant] = field(default_factory=list)
    communicators: int = 0
    held: int = 0


class BuildFunction(Program):
    """A build function and the step that it returns."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def watch(self, lifetimes: Lifetimes) -> Watch:
        return Watch(lifetimes)

    def run(self, watch: Watch, steps: int) -> None:
        try:
            built = watch.built = check_built(self._build(CUDA))
            watch.note_model()
            for step in range(steps):
                watch.step = step
                watch.lifetimes.enter("forward", step)
                check_done(built.step())
                watch.note_states()
        except SystemExit as left:
            raise BuildError(f"the program ended itself (sys.exit({left.code})); {EXPECTED}") from left
        watch.note_model()


def trace(
    build: Build | Program,
    machine: Machine,
    version: tuple[int, int],
    steps: int,
    world_size: int = 1,
    rank: int = 0,
    explain: bool = False,
) -> Trace:
    """Runs `build` and `steps` steps as one rank of `world_size`.

    Args:
        explain: also find out which module makes what.

    Raises:
        BuildError: the program cannot be traced; the text says what to change.
    """
    notes = Notes()
    lifetimes = Lifetimes(torch.is_grad_enabled)
    scratch = Scratch(machine, version, lifetimes)
    composites = Composites(machine, version, notes)
    collectives = Collectives(lifetimes)
    interpreter = Interpreter(lifetimes, Values(), notes, scratch, composites, collectives)
    overrides = Overrides()
    autocast = Autocast(version)
    program = build if isinstance(build, Program) else BuildFunction(build)
    watch = program.watch(lifetimes)
    hooks = TrainingHooks(watch)
    with ExitStack() as stack:
        stack.callback(overrides.remove)
        autocast.register(overrides)
        composites.register(overrides)
        stack.enter_context(world_played(world_size, rank, lifetimes))
        stack.enter_context(devices_played())
        stack.enter_context(cuda_played(machine, lifetimes, notes))
        stack.enter_context(autocast.cache_kept())
        stack.callback(hooks.remove)
        hooks.install()
        stack.enter_context(interpreter)
        if explain:
            places = watch.places = Places()
            lifetimes.allocated = places.note
            stack.enter_context(places.followed())
        try:
            program.run(watch, steps)
        except BuildError:
            raise
        except Exception as error:
            raise failure(error, notes.assumptions()) from error
        lifetimes.close()
    if torch.backends.cudnn.benchmark and any(
        "convolution" in each.op for each in lifetimes.recording.blocks
    ):
        notes.add(
            "cudnn", "cuDNN chooses convolutions by trial (cudnn.benchmark): their workspaces may be others"
        )
    if watch.built is not None and (missing := watch.missing()):
        notes.add("step", missing)
    made_in = {} if watch.places is None else watch.places.of
    return Trace(
        lifetimes.recording,
        watch.owners,
        notes.all(),
        modules={**made_in, **watch.homes},
        instants=watch.instants,
        communicators=len(collectives.groups),
        held=collectives.held,
    )
