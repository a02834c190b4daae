"""What the record says about a run at its start, and how it words the end."""

from __future__ import annotations

import platform
import signal
import socket
import sys
from collections.abc import Iterable

from memtriage.observe import cuda
from memtriage.observe.cgroup import host_limit
from memtriage.observe.exceptions import summary_of, text_of
from memtriage.observe.process_tree import started_at
from memtriage.store.layout import RankIdentity
from memtriage.store.records import Start


def start_record(identity: RankIdentity, argv: list[str], pid: int, began: float) -> Start:
    """Return the first line of a rank's record.

    Args:
        identity: which rank of which run this is.
        argv: the program and its arguments.
        pid: of this process.
        began: when the watch did, in seconds since the epoch.
    """
    return Start(
        run_id=identity.run_id,
        restart=identity.restart,
        rank=identity.rank,
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        pid=pid,
        pid_start=started_at(pid),
        host=socket.gethostname(),
        argv=argv,
        python=platform.python_version(),
        torch=torch_version(),
        time=began,
        host_limit=host_limit().bytes,
    )


def torch_version() -> str | None:
    """torch's version, even if nothing has imported it yet; None if it is not installed."""
    from importlib import metadata

    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)  # a class of its own, not a str
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


class Terminated(Exception):
    """Stands for the end by a signal in the record."""

    @classmethod
    def by(cls, signum: int) -> Terminated:
        """Return the end by this signal."""
        return cls(f"terminated by {signal.Signals(signum).name}")


def exception_text(exception: BaseException) -> str:
    """Return what ended the program: its type and message, or the signal."""
    return text_of(exception) if type(exception) is Terminated else summary_of(exception)


def allocator_peaks(devices: Iterable[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the allocator's peaks of allocated and reserved bytes, by CUDA device."""
    allocated, reserved = {}, {}
    for name in devices:
        if name.startswith("cuda:"):
            counters = cuda.counters(int(name[5:]))
            if counters.peak_allocated is not None and counters.peak_reserved is not None:
                allocated[name] = counters.peak_allocated
                reserved[name] = counters.peak_reserved
    return allocated, reserved
