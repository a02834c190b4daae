"""A thread that samples the host now and then, and makes time-based marks where no steps are seen."""

from __future__ import annotations

import threading
from typing import Protocol

import psutil

from memtriage.observe.cgroup import cgroup_memory
from memtriage.observe.host import children, dev_shm, has_children, host_sample
from memtriage.session.host_watch import HostWatch
from memtriage.store.records import HostSample

_WAKE_S = 0.25
_HOST_EVERY_S = 5.0
_QUIET_S = 5.0
_STOP_WITHIN_S = 2.0
_CHILDREN_EVERY_S = 0.5
_CHILDREN_SHARE = 0.02


class Watched(Protocol):
    """What the sampler needs of a session."""

    step_count: int

    def elapsed(self) -> float: ...
    def mark(self, name: str) -> None: ...
    def seconds_since_mark(self) -> float: ...
    def write_host(self, sample: HostSample) -> None: ...
    def failed(self, where: str, error: Exception) -> None: ...


class Sampler:
    """Samples every few seconds, in a daemon thread; while there are children, more often.

    Args:
        session: told of every few seconds' sample, for the record.
        watch: told of every sample.
    """

    def __init__(self, session: Watched, watch: HostWatch | None = None) -> None:
        self._session = session
        self._watch = watch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memtriage sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. May be called twice, and from the thread itself."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=_STOP_WITHIN_S)

    def _run(self) -> None:
        next_host = next_children = 0.0
        # The first at once: a thread's first allocation reserves address space for a heap of its own, which
        # must not come out of a limit that the program sets later.
        while True:
            try:
                now = self._session.elapsed()
                if self._watch is not None:
                    self._watch.while_training()
                    self._watch.at_shared_memory(dev_shm())
                if now >= next_host:
                    next_host = now + _HOST_EVERY_S
                    self._session.write_host(self.sample())
                elif self._watch is not None and now >= next_children and has_children():
                    self.sample()
                    took = self._session.elapsed() - now
                    next_children = now + max(_CHILDREN_EVERY_S, took / _CHILDREN_SHARE)
                if self._session.seconds_since_mark() >= _QUIET_S:
                    self._session.mark("time")
            except Exception as error:  # a file that vanished, a limit that forbids reading: no sample then
                self._session.failed("host sample", error)
            if self._stop.wait(_WAKE_S):
                break
        self._last()

    def _last(self) -> None:
        """What children have un-shared by the end, if they still live."""
        try:
            if self._watch is not None and has_children():
                self.sample()
        except Exception as error:
            self._session.failed("host sample", error)

    def sample(self) -> HostSample:
        """The host now: this process, its children, the control group."""
        own = host_sample()
        group = cgroup_memory()
        found = children()
        below = [child.pss for child in found if child.pss is not None]
        available = psutil.virtual_memory().available
        if self._watch is not None:
            self._watch.at_sample(own, found, group, available)
        return HostSample(
            time_s=round(self._session.elapsed(), 3),
            step=self._session.step_count,
            rss=own.rss,
            pss=own.pss,
            children_pss=sum(below) if below else None,
            cgroup_usage=None if group is None else group.usage,
            cgroup_limit=None if group is None else group.limit,
            cgroup_reclaimable=None if group is None else group.inactive_file,
            available=available,
            oom_kill=None if group is None else group.oom_kill,
        )
