"""Priming: blocks that are allocated and freed before a program, so that its memory packs closely.

Settings of the allocator may be changed, too, and the states of optimizers be made in separate pools, so that
they do not pin segments of temporary memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from memtriage.allocator.settings import join_conf
from memtriage.model.priming import Priming, StatePool
from memtriage.observe.hooks import TorchImport
from memtriage.observe.states import Around, StateMaking, parameter_bytes
from memtriage.process.stdlib import os

if TYPE_CHECKING:
    from memtriage.model.recording import Recording

FILE: Final = "priming.json"
"""What `run --prime` expected, in the folder of the run's record."""


def prime(
    build: Callable[[Any], Any] | None = None,
    *,
    snapshot: str | os.PathLike[str] | Recording | None = None,
    run: str | os.PathLike[str] | None = None,
) -> Priming:
    """Make memory pack closely: allocate and free some blocks before the model is built.

    The blocks are chosen by simulating the program's steps and variations of them. Their segments stay in the
    allocator's cache and serve later allocations. If that saves more, settings of the allocator are changed,
    too, or each optimizer's first step allocates its states in a separate pool. Call it before the model and
    anything else is on the GPU. Results of the program do not change. Sizes are bytes.

    Args:
        build: returns `(model, optimizer, step)`, as for `memtriage.predict`; six steps are predicted.
        snapshot: a memory snapshot of an earlier run, or its file; recorded from the beginning of the run.
        run: the directory of an earlier `memtriage run --prime`: what was chosen then is used again.

    Returns:
        The blocks, what is reserved without and with them, or why they would not help. `primed` says whether
        they were allocated here: False without CUDA or without enough memory (see `notes`).

    Raises:
        ValueError: not exactly one argument is given, the program cannot be traced, or there is no such run.
        memtriage.SnapshotError: the file is not a snapshot.

    Limits: one device, its default stream, and the allocator's settings of this process. Each
    `torch.cuda.empty_cache()` returns the free segments, and with them the primed ones.
    """
    given = [
        name for name, value in (("build", build), ("snapshot", snapshot), ("run", run)) if value is not None
    ]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'nothing'} given; expected one of build, snapshot and run")
    if build is not None:
        with _random_state_kept():
            from memtriage.planning.priming import plan_priming
            from memtriage.prediction.gpu_kinds import gpu_here

            priming = plan_priming(build, gpu=gpu_here())
    elif snapshot is not None:
        from memtriage.model.recording import Recording
        from memtriage.planning.priming import priming_of_recording
        from memtriage.snapshots.read import load_snapshot

        recording = snapshot if isinstance(snapshot, Recording) else load_snapshot(snapshot)
        priming = priming_of_recording(recording)
    else:
        assert run is not None
        priming = read_priming(Path(run))
    return prime_device(priming)


def prime_device(priming: Priming, device: int | None = None) -> Priming:
    """Allocate and free the chosen blocks on a device.

    Args:
        device: its index; the current one by default.

    Returns:
        The same object, with `primed` set and notes added.
    """
    if not priming.helps:
        return priming
    import torch

    if not torch.cuda.is_available():
        priming.notes.append("CUDA is not available here: nothing was allocated")
        return priming
    index = torch.cuda.current_device() if device is None else device
    reserved = torch.cuda.memory_reserved(index)
    if reserved:
        priming.notes.append(f"{reserved} bytes were reserved before: the figures do not hold for them")
    if priming.pools and not pools_possible():
        priming.notes.append("this torch has no pools for a single thread: nothing was allocated")
        return priming
    if priming.settings:
        set_allocator(priming.settings, priming.allocator_conf)
    failure = allocate(priming.blocks, CudaBlocks(index))
    priming.primed = failure is None
    if failure is not None:
        if priming.settings:
            set_allocator("", priming.allocator_conf)
        priming.notes.append(f"memory does not suffice for the blocks ({failure}): nothing is primed")
    elif priming.pools:
        StatePools(priming.pools, CudaPools(index)).install()
    return priming


def set_allocator(settings: str, own: str) -> None:
    """Set the allocator's settings along with the program's own, which torch would otherwise reset."""
    import torch

    torch.cuda.memory._set_allocator_settings(join_conf(own, settings))


class CudaBlocks:
    """Blocks of PyTorch's allocator, on the default stream of a device. No tensor is made."""

    def __init__(self, device: int) -> None:
        self._device = device

    def allocate(self, size: int) -> Any:
        """Allocate a block; raises MemoryError or RuntimeError where there is no memory."""
        import torch

        return torch.cuda.caching_allocator_alloc(size, self._device, 0)

    def free(self, block: Any) -> None:
        """Free a block."""
        import torch

        torch.cuda.caching_allocator_delete(block)

    def give_back(self) -> None:
        """Return cached memory to the driver."""
        import torch

        torch.cuda.empty_cache()

    def forget_peaks(self) -> None:
        """Reset the peaks."""
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)


def allocate(sizes: Sequence[int], source: CudaBlocks) -> str | None:
    """Allocate blocks of these sizes and free them all. If memory does not suffice, return why.

    In that case all memory is returned, so that the program finds the device as without priming.
    """
    live: list[Any] = []
    failure = None
    try:
        for size in sizes:
            live.append(source.allocate(size))
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        failure = str(error).splitlines()[0] if str(error) else type(error).__name__
    for block in live:
        source.free(block)
    if failure is not None:
        source.give_back()
    source.forget_peaks()
    return failure


def begin_primed(priming: Priming, folder: Path, say: Callable[[str], None]) -> None:
    """Arrange for a program that begins now to be primed, and report what is expected.

    Nothing is imported or initialized for it: priming happens when the program initializes CUDA, before its
    first allocation. So the program may still choose devices, set options or fork.

    Args:
        folder: of the run's record; gets `FILE`.
    """
    say(f"--prime: {priming.in_words()}")
    file = folder / FILE
    _write(priming, file)
    if not priming.helps:
        return
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)

    def begun() -> None:
        known = len(priming.notes)
        try:
            import torch

            prime_device(priming, local_rank if local_rank < torch.cuda.device_count() else 0)
        except Exception as error:  # the program must run, primed or not
            priming.notes.append(f"priming failed ({type(error).__name__}: {error})")
        for note in priming.notes[known:]:
            say(f"--prime: {note}")
        _write(priming, file)

    pid = os.getpid()

    def when_cuda_begins() -> None:
        import torch

        torch.cuda._lazy_call(lambda: begun() if os.getpid() == pid else None)  # not in a fork

    TorchImport(when_cuda_begins).install()


def _write(priming: Priming, file: Path) -> None:
    with suppress(OSError):
        file.write_bytes(msgspec.json.encode(priming))


def read_priming(directory: Path) -> Priming:
    """What the newest run below a directory was primed with.

    Raises:
        ValueError: no run there was started with `--prime`, or its file cannot be read.
    """
    files = sorted(directory.rglob(FILE), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"no run in {str(directory)!r} was recorded by `memtriage run --prime`")
    try:
        priming = msgspec.json.decode(files[-1].read_bytes(), type=Priming)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"cannot read {files[-1]}: {error}") from None
    priming.primed = False
    return priming


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave the random state of Python, NumPy and torch's CPU generator as it was."""
    import random

    import torch

    numpy = sys.modules.get("numpy")
    python, others = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(others)


DROPPED: Final[set[tuple[int, int]]] = set()
"""Ids of pools from which nothing allocates any more: freed segments of theirs can return to the driver."""


class CudaPools:
    """Pools of PyTorch's allocator on a device.

    Only states are in such a pool. When it is dropped, they stay where they are, and their segment is
    returned once they are freed and the cache is emptied.
    """

    def __init__(self, device: int) -> None:
        self._device = device

    def make(self, size: int) -> Any:
        """A pool with one free segment of this size; None if it cannot be made now."""
        import torch

        cuda = torch.cuda
        if (
            cuda.current_device() != self._device
            or cuda.is_current_stream_capturing()
            or cuda.current_stream() != cuda.default_stream()
        ):
            return None
        pool = cuda.MemPool()
        try:
            with self.inside(pool):
                cuda.caching_allocator_delete(cuda.caching_allocator_alloc(size, self._device, 0))
        except RuntimeError:  # also torch.OutOfMemoryError: nothing is flushed for a pool
            return None
        DROPPED.add(pool.id)
        return pool

    def inside(self, pool: Any) -> AbstractContextManager[object]:
        """A context in which this thread allocates from the pool."""
        import torch

        context: AbstractContextManager[object] = torch.cuda.use_mem_pool(pool, self._device)
        return context


def pools_possible() -> bool:
    """Whether this torch can let a single thread allocate from a pool."""
    import torch

    return hasattr(torch.cuda, "use_mem_pool") and hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")


class StatePools:
    """Makes the states of the predicted optimizers in separate pools.

    An optimizer is recognized by the bytes of its parameters, because states of others might not fit. If its
    pool cannot be made, its states are made as usual. The hook is removed when the last of them has states.
    """

    def __init__(self, pools: Sequence[StatePool], source: CudaPools) -> None:
        self._wanted = list(pools)
        self._source = source
        self._pool: Any = None
        self._making = StateMaking(self._begins, self._ends)

    def install(self) -> None:
        """Wait for the optimizers."""
        self._making.install()

    def remove(self) -> None:
        """Stop waiting. Do not call this in a hook of a step."""
        self._making.remove()

    def _begins(self, optimizer: Any) -> Around | None:
        parameters = parameter_bytes(optimizer)
        wanted = next((pool for pool in self._wanted if pool.parameters == parameters), None)
        if wanted is None:
            return None
        self._wanted.remove(wanted)
        self._pool = self._source.make(wanted.size)
        return nullcontext if self._pool is None else partial(self._source.inside, self._pool)

    def _ends(self) -> None:
        self._pool = None
        if not self._wanted:
            self.remove()
