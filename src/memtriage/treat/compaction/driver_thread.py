"""The thread of a compaction that calls the driver while the calling thread searches storages."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from memtriage.treat.compaction.move import MoveProgress, Mover, Prepared, make_bins
from memtriage.treat.compaction.plan import CompactionPlan
from memtriage.treat.device.protocol import OUT_OF_MEMORY, DeviceLayout

Draft = tuple[DeviceLayout, CompactionPlan]
"""A layout, and the plan for it if all blocks can move."""
Job = tuple[CompactionPlan, Mover]
"""A plan, and what carries it out."""


class DriverThread:
    """Makes all allocator calls of a compaction in one thread.

    It starts at once, by returning free memory. Then the caller passes it a draft (`make_bins`) and the plan
    (`move`), and always ends it with `finish`.

    Python runs signal handlers, and raises `KeyboardInterrupt`, only in the main thread: in this one the work
    cannot be interrupted between two of its steps. What is local to the calling thread does not apply there:
    modes, `torch.cuda.use_mem_pool`, the current stream and device.

    Attributes:
        started: the first driver call is about to begin.
        emptying: the driver frees segments, which takes long and does not need the interpreter.
        moved: all moves are done, and only segments have to be freed. No event is awaited longer than the
            thread lasts.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._drafts: SimpleQueue[Draft | None] = SimpleQueue()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.started = threading.Event()
        self.emptying = threading.Event()
        self.moved = threading.Event()
        self._moves: MoveProgress = MoveProgress()
        self._stopped: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="memtriage-compact")
        self._thread.start()

    # Called by the thread that searches.

    def make_bins(self, layout: DeviceLayout, draft: CompactionPlan) -> None:
        """Begin to make the bins of a plan before its storages are known."""
        self._drafts.put((layout, draft))

    def move(self, plan: CompactionPlan, mover: Mover) -> None:
        """Begin to carry out a plan. Bins of another draft are released first."""
        self._jobs.put((plan, mover))

    def finish(self) -> tuple[MoveProgress, str | None]:
        """Wait for the end, even without draft or plan; return what was moved, and why it ended early.

        Raises:
            BaseException: what an operation raised; else what a signal handler raised meanwhile.
        """
        self._drafts.put(None)
        self._jobs.put(None)
        interruption: BaseException | None = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except BaseException as error:
                interruption = error
        failure = self._error or interruption
        if failure is not None:
            raise failure
        return self._moves, self._stopped

    # Called in the driver's thread.

    def _run(self) -> None:
        try:
            with self._prepared.device.entered():
                self._compact()
        except BaseException as error:
            self._error = error
        finally:
            self.started.set()
            self.emptying.set()
            self.moved.set()

    def _compact(self) -> None:
        self.started.set()
        device = self._prepared.device
        device.empty_cache()
        self._prepared.reserved = device.use().reserved
        draft = self._drafts.get()
        if draft is None:
            return
        layout, drafted = draft
        make_bins(self._prepared, layout, drafted)
        job = self._jobs.get()
        if job is None:
            return
        plan, mover = job
        if plan is not drafted:
            self._prepared.drop()
        self._moves, planned = mover.moved, bool(plan.groups)
        try:
            mover.run(plan)
        except OUT_OF_MEMORY as error:
            self._stopped = f"out of memory while moving: {error}"
        # The other thread releases all these while the driver works.
        del draft, layout, drafted, job, plan, mover
        if planned:
            self._prepared.drop()
            device.synchronize()
            self.moved.set()
            self.emptying.set()  # last: the thread that waits for it will hold the interpreter
            device.empty_cache()
