"""A thread that samples the host now and then, and makes time-based marks where no steps are seen."""

from __future__ import annotations

import threading
from typing import Protocol

import psutil

from memtriage.observe.cgroup import cgroup_memory
from memtriage.observe.host import children, host_sample
from memtriage.store.records import HostSample

_WAKE_S = 1.0
_HOST_EVERY_S = 5.0
_QUIET_S = 5.0


class Watched(Protocol):
    """What the sampler needs of a session."""

    step_count: int

    def elapsed(self) -> float: ...
    def mark(self, name: str) -> None: ...
    def seconds_since_mark(self) -> float: ...
    def write_host(self, sample: HostSample) -> None: ...
    def failed(self, where: str, error: Exception) -> None: ...


class Sampler:
    """Samples every few seconds, in a daemon thread."""

    def __init__(self, session: Watched) -> None:
        self._session = session
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memtriage sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. May be called twice, and from the thread itself."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _WAKE_S)

    def _run(self) -> None:
        next_host = 0.0
        # The first at once: a thread's first allocation reserves address space for a heap of its own, which
        # must not come out of a limit that the program sets later.
        while True:
            try:
                now = self._session.elapsed()
                if now >= next_host:
                    next_host = now + _HOST_EVERY_S
                    self._session.write_host(self.sample())
                if self._session.seconds_since_mark() >= _QUIET_S:
                    self._session.mark("time")
            except Exception as error:  # a file that vanished, a limit that forbids reading: no sample then
                self._session.failed("host sample", error)
            if self._stop.wait(_WAKE_S):
                return

    def sample(self) -> HostSample:
        """The host now: this process, its children, the control group."""
        own = host_sample()
        group = cgroup_memory()
        below = [child.pss for child in children() if child.pss is not None]
        return HostSample(
            time_s=round(self._session.elapsed(), 3),
            step=self._session.step_count,
            rss=own.rss,
            pss=own.pss,
            children_pss=sum(below) if below else None,
            cgroup_usage=None if group is None else group.usage,
            cgroup_limit=None if group is None else group.limit,
            cgroup_reclaimable=None if group is None else group.inactive_file,
            available=psutil.virtual_memory().available,
            oom_kill=None if group is None else group.oom_kill,
        )
