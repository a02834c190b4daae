"""`memtriage.watch`, `memtriage.mark` and `memtriage.step`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memtriage.process import active

if TYPE_CHECKING:
    from memtriage.session.run import Watch


def mark(name: str) -> None:
    """Name this instant: the counters are read and recorded under `name`. Does nothing without a watch.

    Takes well under 0.2 ms and synchronizes nothing: on CUDA the allocator's counters include the kernels
    that were launched but have not finished.

    Args:
        name: any text, e.g. `after refit`; growth is not judged at these marks.
    """
    if active.session is not None:
        active.session.mark(name)


def step() -> None:
    """Say that one training step is complete. Does nothing without a watch.

    Needed only in loops whose steps cannot be seen (CUDA graphs, compiled or foreign optimizers). After the
    first call, optimizer hooks no longer count steps.
    """
    if active.session is not None:
        active.session.user_step()


def watch(
    directory: str | os.PathLike[str] | None = None, *, quiet: bool = False, listen: bool = False
) -> Watch:
    """Watch a `with` block as `memtriage run` watches a script.

    Each `torch.autograd.backward` and each optimizer step makes a mark. Censuses are taken for the ledger (at
    the third step, and at the end if the memory is still in use), others only if growth or an out-of-memory
    error calls for one. On exit everything installed is removed, the report is printed to stderr, and the
    result (a `memtriage.RunReport`) is in the watch's `report`.

    Args:
        directory: where the record goes; `$MEMTRIAGE_DIR` or `memtriage-run` by default.
        quiet: print nothing.
        listen: meanwhile answer `memtriage census --pid N`, as `memtriage run --listen` does.

    Raises:
        RuntimeError: on entering, if this process is watched already.

    Limits: one watch at a time in a process. Replays of CUDA graphs, and steps of compiled optimizers and of
    optimizers that are not a `torch.optim.Optimizer`, make no marks: call `step()` after each.
    """
    from memtriage.session.run import Watch

    return Watch(directory, quiet=quiet, listen=listen)
