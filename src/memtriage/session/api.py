"""`memtriage.watch`, `memtriage.mark` and `memtriage.step`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memtriage.process import active

if TYPE_CHECKING:
    from memtriage.session.run import Watch


def mark(name: str) -> None:
    """Names this instant: the counters are read and recorded under `name`. Does nothing without a watch.

    Costs well under 0.2 ms and synchronizes nothing, so on CUDA the allocator's counters are those of the
    calls made so far, finished or not.

    Args:
        name: any text, e.g. `after refit`; growth is not judged at these marks.
    """
    if active.session is not None:
        active.session.mark(name)


def step() -> None:
    """Says that one training step is complete. Does nothing without a watch.

    Only loops whose steps cannot be seen need it (CUDA graphs, compiled or foreign optimizers). From the
    first call on, optimizer hooks no longer count steps.
    """
    if active.session is not None:
        active.session.user_step()


def watch(
    directory: str | os.PathLike[str] | None = None, *, quiet: bool = False, listen: bool = False
) -> Watch:
    """A context manager that watches the block inside it, as `memtriage run` watches a script.

    Marks are made by `torch.autograd.backward` and by optimizer steps. One census is taken for the ledger (at
    the third step, or at the end of a shorter run), others only when growth or an out-of-memory error asks
    for one. On exit everything installed is removed, the report is printed to
    stderr, and the result (`memtriage.RunReport`) is in the watch's `report`.

    Args:
        directory: where the record goes; `$MEMTRIAGE_DIR` or `memtriage-run` by default.
        quiet: print nothing.
        listen: meanwhile answer `memtriage census --pid N`, as `memtriage run --listen` does.

    Raises:
        RuntimeError: on entering, when this process is watched already.

    Limits: one watch at a time in a process. Steps of compiled optimizers and of optimizers that are no
    `torch.optim.Optimizer`, and replays of CUDA graphs, make no marks: call `step()` after each.
    """
    from memtriage.session.run import Watch

    return Watch(directory, quiet=quiet, listen=listen)
