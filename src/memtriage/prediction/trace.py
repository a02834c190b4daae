"""Runs a build function and its steps without a GPU, and records what they would allocate there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memtriage.allocator.settings import AllocatorSettings
from memtriage.observe.hooks import TrainingHooks
from memtriage.observe.states import StateMaking, parameter_bytes
from memtriage.prediction.allocator_conf import AllocatorConf
from memtriage.prediction.build import EXPECTED, Build, BuildError, Built, check_built, check_done, failure
from memtriage.prediction.compiled.entry import Compiler
from memtriage.prediction.compiled.graphs import CudaGraphs
from memtriage.prediction.compiled.trials import KernelTrials
from memtriage.prediction.distributed.broadcasts import Broadcasts
from memtriage.prediction.distributed.collectives import Collectives
from memtriage.prediction.distributed.world import check_world, fake_world
from memtriage.prediction.drawn import Draws
from memtriage.prediction.fake_cuda.autocast import Autocast
from memtriage.prediction.fake_cuda.composites import Composites
from memtriage.prediction.fake_cuda.extensions import compiled_parts_optional
from memtriage.prediction.fake_cuda.overrides import Overrides
from memtriage.prediction.fake_cuda.stand_ins import replaced
from memtriage.prediction.fake_cuda.tensors import fake_devices, gpu
from memtriage.prediction.fake_cuda.torch_cuda import fake_cuda
from memtriage.prediction.fake_cuda.triton import fake_triton
from memtriage.prediction.gpu_kinds import NO_GPU, GpuKind
from memtriage.prediction.host.libraries import Imports, measure
from memtriage.prediction.host.memory import HostMemory, HostTrace
from memtriage.prediction.host.program import HostNotes, host_followed, without_gpu
from memtriage.prediction.interpreter import Interpreter
from memtriage.prediction.lifetimes import AllocationTrace, Lifetimes
from memtriage.prediction.notes import Notes
from memtriage.prediction.places import Places
from memtriage.prediction.scratch.table import Scratch
from memtriage.prediction.simulate import LiveReplay
from memtriage.prediction.values import KnownValues
from memtriage.prediction.watch import OPTIMIZER_STATE, TracedProgram, TraceWatch


@dataclass(slots=True)
class Trace:
    """What a trace found.

    Attributes:
        recording: allocations and frees.
        conf: the allocator's settings, as text.
        settings: the same, parsed.
        owners: of blocks, where known: `parameter`, `gradient`, `optimizer state`, `buffer`.
        notes: what was assumed.
        modules: paths of the modules that blocks belong to, where known.
        sites: the lines that made them, where known.
        inputs: the shapes of what each model was given last, by its class.
        communicators: how many ranks each process group has that NCCL makes a communicator for.
        held: bytes of DDP's first bucket, where another has replaced it.
        steps: how many steps were traced.
        varies: whether the steps may differ (`Program.varies`).
        cudnn_tries: whether cuDNN chooses convolutions by trial.
        convolves: whether there were convolutions.
        compile_trials: bytes that trials of kernels held at once; None where nothing was compiled or tried.
        host: the host's timeline; None unless asked for.
        optimizers: bytes of the parameters of those that `TracedBlock.state_of` counts.
        draws: what was drawn at random in each step; None unless the program's steps are drawn again.
    """

    recording: AllocationTrace
    conf: str
    settings: AllocatorSettings
    owners: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    modules: dict[int, str] = field(default_factory=dict)
    sites: dict[int, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    communicators: list[int] = field(default_factory=list)
    held: int = 0
    steps: int = 0
    varies: bool = False
    cudnn_tries: bool = False
    convolves: bool = False
    compile_trials: int | None = None
    host: HostTrace | None = None
    optimizers: list[int] = field(default_factory=list)
    draws: Draws | None = None


class BuildFunction(TracedProgram):
    """A build function and the step that it returns."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def watch(self, lifetimes: Lifetimes) -> TraceWatch:
        return TraceWatch(lifetimes)

    def run(self, watch: TraceWatch, steps: int) -> int:
        try:
            built = watch.built = check_built(self._build(gpu()))
            watch.note_model()
            step = 0
            while step < (steps := self.wanted(watch, steps)):
                watch.step = step
                watch.progress(step + 1, steps)
                watch.lifetimes.enter("forward", step)
                check_done(self.call(built, step))
                watch.note_states()
                step += 1
        except SystemExit as left:
            raise BuildError(f"the program ended itself (sys.exit({left.code})); {EXPECTED}") from left
        watch.note_model()
        return steps

    def wanted(self, watch: TraceWatch, steps: int) -> int:
        """How many steps are traced, where so many were asked for, as of the next one."""
        return steps

    def call(self, built: Built, step: int) -> Any:
        """Run one step, counted from 0."""
        return built.step()


@contextmanager
def _failures_described(notes: Notes | None = None) -> Iterator[None]:
    """Raise what fails inside as a `BuildError` that says what to change, and what had been assumed."""
    try:
        yield
    except BuildError:
        raise
    except Exception as error:
        raise failure(error, () if notes is None else notes.assumptions()) from error


@_failures_described()
def trace(
    build: Build | TracedProgram,
    machine: GpuKind,
    version: tuple[int, int],
    steps: int,
    world_size: int = 1,
    rank: int = 0,
    explain: bool = False,
    allocator_conf: str | None = "",
    progress: Callable[[int, int], None] | None = None,
    host: bool = False,
    broadcasts: Broadcasts | None = None,
) -> Trace:
    """Run `build` and `steps` steps as one rank of `world_size`.

    Args:
        explain: also find out which module and line make what.
        allocator_conf: as in `PYTORCH_CUDA_ALLOC_CONF`; None for what the environment and the program set.
        progress: called with the number of each step that begins, from 1, and how many are wanted.
        host: also follow the memory of the host, of a script to its end.
        broadcasts: what rank 0 sends to the others; not known to them by default.

    Raises:
        BuildError: the program cannot be traced, there is no such rank, or torch would refuse
            `allocator_conf`; the text says what to change.
    """
    check_world(world_size, rank)
    notes = Notes()
    conf = AllocatorConf(allocator_conf, version, notes)
    lifetimes = Lifetimes(torch.is_grad_enabled)
    lifetimes.begun = conf.use
    scratch = Scratch(machine, version, lifetimes)
    composites = Composites(machine, version, notes)
    collectives = Collectives(lifetimes)
    trials = KernelTrials(lifetimes, machine.l2_cache, scratch.workspaces)
    compiler = Compiler(machine, version, notes, trials, CudaGraphs(lifetimes))
    values = KnownValues()
    program = build if isinstance(build, TracedProgram) else BuildFunction(build)
    watch = program.watch(lifetimes)
    if program.draws_again:
        values.draws = watch.draws = Draws(lambda: lifetimes.step)
    interpreter = Interpreter(
        lifetimes,
        values,
        notes,
        scratch,
        composites,
        collectives,
        broadcasts or Broadcasts(),
        compiler,
    )
    overrides = Overrides()
    autocast = Autocast(version)
    compiler.watch = watch
    if progress is not None:
        watch.progress = progress
    hooks = TrainingHooks(watch)
    optimizers: list[int] = []

    def states_begin(optimizer: Any) -> Callable[[], AbstractContextManager[None]]:
        optimizers.append(parameter_bytes(optimizer))
        return partial(replaced, lifetimes, "state_of", len(optimizers) - 1)

    states = StateMaking(states_begin, lambda: None)
    memory = HostMemory() if host else None
    imports = Imports()
    allocator = LiveReplay(lifetimes.recording, lambda: conf.use()[1], machine.memory)
    with ExitStack() as stack:
        stack.callback(overrides.remove)
        stack.enter_context(compiled_parts_optional())
        autocast.register(overrides)
        composites.register(overrides)
        stack.enter_context(fake_world(world_size, rank, lifetimes))
        stack.enter_context(fake_devices(rank))
        stack.enter_context(
            fake_cuda(
                machine,
                lifetimes,
                allocator,
                conf,
                notes,
                compiler.compile,
                values.generator,
                world_size,
            )
        )
        stack.enter_context(replaced(torch._C, "_cuda_clearCublasWorkspaces", scratch.workspaces.clear))
        if machine is NO_GPU:
            stack.enter_context(without_gpu())
        stack.enter_context(fake_triton(machine, trials.call))
        stack.enter_context(compiler.earlier_compiled())
        stack.callback(compiler.close)
        stack.enter_context(autocast.cache_kept())
        stack.callback(hooks.remove)
        hooks.install()
        stack.callback(states.remove)
        states.install()
        if memory is not None:
            watch.host = memory
            interpreter.host = HostNotes(memory)
            stack.enter_context(host_followed(memory, lifetimes, notes))
            stack.enter_context(imports.followed())
        stack.enter_context(interpreter)
        stack.enter_context(interpreter.in_threads())
        routing = values.routing = program.routing
        if routing is not None:
            routing.passes = lambda: len(lifetimes.recording.markers)
        if explain:
            watch.places = Places()
            lifetimes.allocated = watch.places.note
        with _failures_described(notes):
            made = program.run(watch, steps)
        if routing is not None:
            routing.check()
        compile_trials = compiler.tried()
        lifetimes.close()
    if memory is not None:
        trains = any(owner == OPTIMIZER_STATE for owner in memory.trace.owners.values())
        measured = measure(imports.names, trains, world_size)
        if measured is None:
            notes.add("what libraries take could not be measured: the host's memory is without them")
        else:
            memory.trace.libraries = measured
    for remark in watch.remarks():
        notes.add(remark)
    places = watch.places or Places()
    return Trace(
        lifetimes.recording,
        *conf.use(),
        watch.owners,
        notes.all(),
        modules={**places.of, **watch.homes},
        sites=places.sites,
        inputs=places.inputs,
        communicators=[*collectives.groups.values()],
        held=collectives.held,
        steps=made,
        varies=program.varies,
        cudnn_tries=scratch.tried,
        convolves=scratch.convolved,
        compile_trials=compile_trials,
        host=None if memory is None else memory.trace,
        optimizers=optimizers,
        draws=values.draws,
    )
