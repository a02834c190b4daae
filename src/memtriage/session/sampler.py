"""A thread that samples the host now and then, and has time-based marks made if no steps are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from memtriage.model.position import TrainingPosition
from memtriage.observe.cgroup import CgroupMemory, cgroup_memory
from memtriage.observe.host import ChildSample, HostSample, children, dev_shm, host_sample
from memtriage.observe.process_tree import descendants
from memtriage.process.stdlib import threading
from memtriage.process.threads import OwnThread
from memtriage.session.host_watch import HostWatch
from memtriage.session.time_marks import TimeMarks
from memtriage.store.records import HostSampleLine

_Result = TypeVar("_Result")
_WAKE_S = 0.1
_SAMPLE_S = 0.25
_HOST_EVERY_S = 5.0
_STOP_WITHIN_S = 2.0
_CHILDREN_EVERY_S = 0.5
_CHILDREN_SHARE = 0.02


@dataclass(slots=True)
class Sampler:
    """Samples every few seconds in its own thread; while there are children, more often.

    Args:
        watch: gets every sample.
        now: returns where training stands, with the time.
        marks: asked at each wake whether a time-based mark is due.
        within_step: called with each sample, to note what a step takes.
        write: gets a sample every few seconds, for the record.
        job: called at each wake, to read the processes of the job.
        whole: gets each sample of this process, its children and the control group.
        failed: notes that a part of the watch failed, by its name.
    """

    watch: HostWatch
    now: Callable[[], TrainingPosition]
    marks: TimeMarks
    within_step: Callable[[], None]
    write: Callable[[HostSampleLine], None]
    job: Callable[[], None]
    whole: Callable[[HostSample, list[ChildSample], CgroupMemory | None], None]
    failed: Callable[[str, BaseException], None]
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: OwnThread = field(init=False)
    _next: float = 0.0
    _next_host: float = 0.0
    _next_children: float = 0.0

    def __post_init__(self) -> None:
        self._thread = OwnThread(self._run)

    def start(self) -> None:
        """Start the thread; if that fails, there are no samples."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.failed("host samples", error)

    def stop(self) -> None:
        """End the thread and the time-based marks. May be called twice, and from the thread itself."""
        self._stop.set()
        self.marks.stop()
        self._thread.join(timeout=_STOP_WITHIN_S)

    def _run(self) -> None:
        # Take the first sample at once: a thread's first allocation reserves address space for a separate
        # heap, which must not count against a limit that the program sets later.
        while True:
            self._try(self._sample_if_due)
            self._try(self.job)
            due_s = self._try(self.marks.at_wake)
            if self._stop.wait(_WAKE_S if due_s is None else min(_WAKE_S, due_s)):
                break
        self._try(self._sample_children)

    def _try(self, part: Callable[[], _Result]) -> _Result | None:
        """Do a part of the work, and note a failure.

        A file may be gone, or a limit or an audit hook may forbid reading. The thread and the other part
        continue then.
        """
        try:
            return part()
        except (Exception, SystemExit) as error:
            self.failed("host sample", error)
            return None

    def _sample_if_due(self) -> None:
        now = self.now().time_s
        if now < self._next:
            return  # it has only come for a mark
        self._next = now + _SAMPLE_S
        self.within_step()
        self.watch.at_shared_memory(dev_shm())
        if now >= self._next_host:
            self._next_host = now + _HOST_EVERY_S
            self.write(self.sample())
        elif now >= self._next_children:
            self._sample_children()
            took = self.now().time_s - now
            self._next_children = now + max(_CHILDREN_EVERY_S, took / _CHILDREN_SHARE)

    def _sample_children(self) -> None:
        """Take what children have un-shared by now, if there are any."""
        if descendants():
            self.sample()

    def sample(self) -> HostSampleLine:
        """Return the host now: this process, its children, the control group."""
        own = host_sample()
        group = cgroup_memory()
        processes = children()
        below = [child.pss for child in processes if child.pss is not None]
        available = psutil.virtual_memory().available
        self.watch.at_sample(own, processes, group, available)
        self.whole(own, processes, group)
        position = self.now()
        return HostSampleLine(
            time_s=round(position.time_s, 3),
            step=position.step,
            rss=own.rss,
            pss=own.pss,
            children_pss=sum(below) if below else None,
            cgroup_usage=None if group is None else group.usage,
            cgroup_limit=None if group is None else group.limit,
            cgroup_reclaimable=None if group is None else group.inactive_file,
            available=available,
            oom_kill=None if group is None else group.oom_kill,
        )
