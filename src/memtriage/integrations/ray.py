"""memtriage in Ray Train: each worker's training loop is watched, its records are in one run directory.

trainer = TorchTrainer(watched(train_loop_per_worker), scaling_config=ScalingConfig(num_workers=8))
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from memtriage.integrations.training import WatchedTraining
from memtriage.process.optional import needs
from memtriage.session.run import WatchedProgram
from memtriage.store.layout import DIRECTORY_VARIABLE, identify

with needs("ray", "ray", "Watching Ray Train's workers"):
    import ray.train

P = ParamSpec("P")
T = TypeVar("T")

_FOLDER: Final = "memtriage"
_LOCAL: Final = "local"  # what pyarrow calls the file system of directories


def watched(loop: Callable[P, T], *, directory: str | os.PathLike[str] | None = None) -> Callable[P, T]:
    """Return a training loop that is watched in each worker that runs it.

    What grows, what holds it and out-of-memory errors become findings that name their rank. The first rank
    puts the verdict over all ranks, with every finding in full, into its log (`memtriage`), which Ray shows
    where the trainer was started. Whatever the loop returns or raises passes through unchanged.

    Args:
        loop: what the trainer takes as `train_loop_per_worker`, with or without a `config`.
        directory: where the records go; by default `$MEMTRIAGE_DIR`, else `memtriage` in the run's folder of
            the trainer's storage (`RunConfig(storage_path=..., name=...)`). All nodes should see it:
            otherwise each keeps its own ranks, to be merged by `memtriage report DIR DIR...`, and the first
            rank waits up to 20 seconds for the others.

    Limits: a worker that Ray stops because another one failed writes no end; its record is complete up to
    there. Where the trainer's storage is in a cloud, the records go to `~/ray_results/<run>/memtriage` of
    each node unless `directory` says otherwise; in Ray's local mode (no workers) to `./memtriage-run`.
    """
    argv = list(sys.argv)
    root = _root(loop)

    @functools.wraps(loop)
    def watched_loop(*args: P.args, **kwargs: P.kwargs) -> T:
        training = WatchedTraining()
        training.begin(*_place(directory, argv, root))
        try:
            result = loop(*args, **kwargs)
        except BaseException as error:
            training.end(error)
            raise
        training.end()
        return result

    return watched_loop


def _place(
    directory: str | os.PathLike[str] | None, argv: list[str], root: str | None
) -> tuple[Path | None, WatchedProgram]:
    """Return where this worker's record goes, and which rank of which run it is."""
    context = ray.train.get_context()
    name = context.get_experiment_name() or "ray-train"
    # The port differs from attempt to attempt of a run: each has a folder of its own.
    port = os.environ.get("MASTER_PORT")
    environment = {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "TORCHELASTIC_RUN_ID": name if port is None else f"{name}-{port}",
    }
    identity = identify(environment, pid=os.getpid(), time_s=time.time())
    given = directory or os.environ.get(DIRECTORY_VARIABLE)
    return Path(given) if given else _in_storage(context, name), WatchedProgram(identity, argv, root)


def _in_storage(context: Any, name: str) -> Path | None:
    """Return the folder for records in the trainer's storage; None where it has no storage."""
    try:
        storage = context.get_storage()
        on_disk, folder = storage.storage_filesystem.type_name == _LOCAL, storage.experiment_fs_path
    except Exception:  # local mode has none; and what Ray offers to developers only may change in any release
        return None
    return Path(folder, _FOLDER) if on_disk else Path.home() / "ray_results" / name / _FOLDER


def _root(loop: Callable[..., Any]) -> str | None:
    """Return the folder of the file that a loop was written in."""
    try:
        return os.path.dirname(os.path.abspath(inspect.getsourcefile(inspect.unwrap(loop)) or ""))
    except TypeError:  # a callable object, or one that is built in
        return None
