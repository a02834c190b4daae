"""What grows: follows the counters at marks, takes the censuses that this asks for, and judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

from memtriage.diagnose.growth.counter import CODE
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.judge import Evidence
from memtriage.model.findings import Finding
from memtriage.model.judged import Judged
from memtriage.observe import cuda
from memtriage.observe.counters import CounterReader, Reading
from memtriage.observe.generated_code import generated_code
from memtriage.observe.host import InUse
from memtriage.process.stdlib import time
from memtriage.session.ledgers import LedgerKeeper
from memtriage.session.marks import MarkPoint
from memtriage.session.progress import TrainingProgress
from memtriage.session.schedule.investigation import Investigator
from memtriage.session.schedule.judgment import find_leaks, judge_devices, limits_and_use
from memtriage.session.schedule.scheduler import CensusScheduler
from memtriage.session.transient_peak import TransientPeak

_CODE_SHARES: Final = (0.02, 0.005)
"""Part of the time that readings of the generated code's size may take: the first ones, and all later."""
_CODE_FIRST: Final = 64
"""First readings, of 1 ms each: a run of a few seconds is to have enough of them."""
_WORK_S: Final = 0.5e-3
"""Seconds from which on a mark has done more than to read counters."""


class GrowthWatch:
    """Gathers evidence of growth, and says what grows whenever it is asked.

    Attributes:
        limits: bytes at which memory runs out, by device, as of the last judgment.
        scheduler: decides on the censuses, and has the counters.
        transient: what comes and goes between marks.

    Args:
        reader: of the counters.
        progress: where training stands.
        ledgers: takes the ledgers while a census is open.
        script_root: folder of the user's script, for allocation sites.
        say: takes one line about what takes time.
        report: takes what grows so far, whenever that may have changed.
        rank: whose findings they are.
        batches_vary: says whether the program has trained on batches of several sizes.
    """

    def __init__(
        self,
        reader: CounterReader,
        progress: TrainingProgress,
        ledgers: LedgerKeeper,
        *,
        script_root: str | None,
        say: Callable[[str], None],
        report: Callable[[list[Finding]], None],
        rank: int | None,
        batches_vary: Callable[[], bool],
    ) -> None:
        self.limits: dict[str, int] = {}
        self.transient = TransientPeak()
        self._reader = reader
        self._progress = progress
        self._ledgers = ledgers
        self._rank = rank
        self._batches_vary = batches_vary
        self._investigator = Investigator(script_root, say, ledgers.before_census)
        self.scheduler = CensusScheduler(self._investigator, ledgers.take, lambda: report(self.leaks()))
        self._own: dict[str, int] = {}
        self._code_readings = 0
        self._code_due_s = 0.0
        self._read: dict[str, bool] = {}
        self._in_use: InUse | None = None
        self._readings: Sequence[Reading] = ()

    # --- while the program runs -----------------------------------------------------------------------------

    def install(self) -> None:
        """Make ready to record, before the program runs."""
        self._investigator.install()

    def in_backward(self, inside: bool) -> None:
        """A backward begins or has ended: recorders of allocation sites are off inside."""
        self._investigator.in_backward(inside)

    def at_mark(self, mark: MarkPoint) -> None:
        """Follow the counters of a mark, and take a census where it is time for one."""
        if mark.name != "end":  # by then the program's functions have returned, and their memory is gone
            self._in_use, self._readings = self._reader.in_use(), mark.readings
            self.transient.at_mark(mark.readings)
        for reading in mark.readings:
            self._read[reading.device] = reading.allocated is not None or self._read.get(
                reading.device, False
            )
        if mark.name in ("step", "backward", "time"):
            values, started = self._values(mark), time.perf_counter()
            self.scheduler.at_mark(mark.name, mark.position, values)
            if self._ledgers.due():
                self.scheduler.census(mark.position)
            if time.perf_counter() - started > _WORK_S:
                self._leave_out_own(values)

    def judged(self) -> dict[str, Judged]:
        """Return by device whether growth could be judged, and how small a leak would have been found."""
        return judge_devices(self.scheduler.judged_on, self._read)

    def _values(self, mark: MarkPoint) -> dict[str, int]:
        """Bytes by counter; what cannot be read, or is disturbed, is left out."""
        values = {}
        for reading in mark.readings:
            # What the recorders of an investigation take themselves is in malloc's counter.
            disturbed = reading.device == "cpu" and self._investigator.recording
            if reading.allocated is not None and not disturbed:
                values[reading.device] = reading.allocated
        own = self._own
        values = {name: value - own.get(name, 0) for name, value in (values | self._resident()).items()}
        within_step = mark.name == "backward" and mark.position.step > 0
        return values if within_step else values | self._code()

    def _leave_out_own(self, before: Mapping[str, int]) -> None:
        """Leave out of all readings to come what a census, or the first estimate, has left behind."""
        malloc = self._reader.in_malloc()
        now = self._resident() | ({} if malloc is None else {"cpu": malloc})
        for name, value in now.items():
            if name in before:
                self._own[name] = value - before[name]

    def _code(self) -> dict[str, int]:
        """How much code was generated, now and then, where it may be for new shapes."""
        now = time.perf_counter()
        if now < self._code_due_s or cuda.initialized() or not self._shapes_vary():
            return {}
        started = time.thread_time()
        code = generated_code()
        took, share = time.thread_time() - started, _CODE_SHARES[self._code_readings >= _CODE_FIRST]
        self._code_due_s, self._code_readings = now + took / share, self._code_readings + 1
        return {} if code is None else {CODE: code}

    def _shapes_vary(self) -> bool:
        """Whether shapes of the input vary, or are not known: a program without backwards shows none."""
        return self.scheduler.main.scale == "second" or self._batches_vary()

    def _resident(self) -> dict[str, int]:
        resident = {"shared": self._reader.shared(), "host": self._reader.rss()}
        return {name: value for name, value in resident.items() if value is not None}

    def leaks(self) -> list[Finding]:
        """Return what grows as far as is known, largest first."""
        self.limits, used = limits_and_use(self._in_use, self._readings, self.transient.most())
        main = self.scheduler.main
        evidence = Evidence(
            main.scale,
            self._progress.now(),
            {name: counter.estimate() for name, counter in main.counters.items()},
            self.limits,
            used,
            main.investigation.collector_off,
            caches_may_fill=self._shapes_vary(),
        )
        leaks = find_leaks(self.scheduler, evidence)
        for finding in leaks:
            finding.rank = self._rank
        return leaks

    # --- when memory runs out, and at the end ---------------------------------------------------------------

    def interrupted(self, frames: Sequence[FrameType]) -> CensusPoint:
        """Take a census in the middle of what failed; `frames` as `CensusScheduler.census` has them."""
        return self.scheduler.census(self._progress.now(), frames)

    def end(self, frames: Sequence[FrameType] | None) -> None:
        """Look once more at what is suspected; `frames` as `Follower.end` has them."""
        self.scheduler.main.end(self._progress.now(), frames)

    def remove(self) -> None:
        """Recorders go off for good."""
        self._investigator.remove()

    def take_ledgers(self) -> None:
        """Take a census for the ledgers alone, in a run that had none."""
        if not self._ledgers.taken:
            self.scheduler.census(self._progress.now())
