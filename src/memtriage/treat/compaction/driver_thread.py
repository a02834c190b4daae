"""The thread of a compaction that calls the driver while the calling thread searches storages."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from memtriage.treat.compaction.move import SPARE, MoveProgress, Mover
from memtriage.treat.compaction.plan import CompactionPlan
from memtriage.treat.compaction.prepare import Prepared, give_back, make_bins
from memtriage.treat.device.background import BackgroundTask
from memtriage.treat.device.layout import DeviceLayout
from memtriage.treat.device.protocol import is_out_of_memory

Draft = tuple[DeviceLayout, CompactionPlan]
"""A layout, and the plan for it if all blocks can move."""
Job = tuple[CompactionPlan, Mover]
"""A plan, and what carries it out."""


class DriverThread:
    """Makes all allocator calls of a compaction in one thread.

    It starts at once, by returning free memory. Then the caller passes it a draft (`make_bins`) and the plan
    (`move`), and always ends it with `finish`. No `wait_until_...` lasts longer than the thread.

    Args:
        prepared: the bins of the device.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._drafts: SimpleQueue[Draft | None] = SimpleQueue()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._started = threading.Event()
        self._emptying = threading.Event()
        self._moved = threading.Event()
        self._task = BackgroundTask(self._run)

    # Called by the thread that searches.

    def make_bins(self, layout: DeviceLayout, draft: CompactionPlan) -> None:
        """Begin to make the bins of a plan before its storages are known."""
        self._drafts.put((layout, draft))

    def move(self, plan: CompactionPlan, mover: Mover) -> None:
        """Begin to carry out a plan. Bins of another draft are released first."""
        self._jobs.put((plan, mover))

    def wait_until_started(self) -> None:
        """Wait until the first driver call is about to begin."""
        self._started.wait()

    def wait_until_emptying(self) -> None:
        """Wait until the driver frees segments, which takes long and does not need the interpreter."""
        self._emptying.wait()

    def wait_until_moved(self) -> None:
        """Wait until all moves are done, and only segments have to be freed."""
        self._moved.wait()

    def finish(self) -> tuple[MoveProgress, str | None]:
        """Wait for the end, even without draft or plan; return what was moved, and why it ended early.

        Raises:
            BaseException: what an operation raised, or a signal handler meanwhile.
        """
        self._drafts.put(None)
        self._jobs.put(None)
        return self._task.result()

    # Called in the driver's thread.

    def announce_emptying(self) -> None:
        """Say that the driver is about to free segments: see `wait_until_emptying`."""
        self._emptying.set()

    def _run(self) -> tuple[MoveProgress, str | None]:
        try:
            # Contexts that the caller has entered do not apply to another thread.
            with self._prepared.device.entered():
                return self._compact()
        finally:
            self._started.set()
            self._emptying.set()
            self._moved.set()

    def _compact(self) -> tuple[MoveProgress, str | None]:
        self._started.set()
        give_back(self._prepared)
        draft = self._drafts.get()
        if draft is None:
            return MoveProgress(), None
        layout, drafted = draft
        make_bins(self._prepared, layout, drafted, SPARE)
        job = self._jobs.get()
        if job is None:
            return MoveProgress(), None
        plan, mover = job
        if plan is not drafted:
            self._prepared.drop()
        stopped, moved, planned = _carry_out(plan, mover), mover.moved, bool(plan.groups)
        # The other thread releases all these while the driver works.
        del draft, layout, drafted, job, plan, mover
        if planned:
            self._prepared.drop()
            self._prepared.device.synchronize()
            self._moved.set()
            self._emptying.set()  # last: the thread that waits for it will hold the interpreter
            self._prepared.device.empty_cache()
        return moved, stopped


def _carry_out(plan: CompactionPlan, mover: Mover) -> str | None:
    """Carry out a plan; return why that ended early, or None."""
    try:
        mover.run(plan)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return f"out of memory while moving: {error}"
    return None
