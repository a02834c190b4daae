"""Closed ledgers for the record: which censuses take them, and when the next one is due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from memtriage.account.census import CensusView
from memtriage.account.host_reading import HostReading, read_host
from memtriage.account.job_ledger import take_job_ledger
from memtriage.account.ledgers import read_devices, take_ledgers
from memtriage.diagnose.after_backward import left_after_backward
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger
from memtriage.observe.autograd import unread_saved_tensors
from memtriage.observe.counters import uncounted
from memtriage.observe.cuda import is_rocm
from memtriage.observe.foreign import is_programs_exception
from memtriage.observe.process_tree import descendants
from memtriage.process.stdlib import time
from memtriage.session.host_watch import HostWatch
from memtriage.session.live_state import LiveState
from memtriage.session.marks import MarkPoint
from memtriage.session.progress import TrainingProgress
from memtriage.session.record import SessionRecord

_LEDGER_SHARE: Final = 0.002
"""Part of the time that censuses for ledgers alone may take."""
_LAST_S: Final = 10.0
_LAST_SHARE: Final = 0.02
"""Seconds, or part of the time, that a census after the program's end may take."""
_STILL_THERE: Final = 0.75
"""Part of what the last step had in use that must be left at the end: the program's functions, whose
variables the ledgers are about, may have returned."""
_LASTING: Final = frozenset(("parameter", "buffer", "optimizer state"))
"""Owners of tensors that are there between two steps, unlike gradients and activations."""


@dataclass(slots=True)
class LedgerKeeper:
    """Takes the ledgers of every device in use, and of the host, while a census is open.

    Attributes:
        baselines: bytes in use outside this process's allocator at the first mark, by CUDA device.
        last: the latest ledgers; none before the first census.
        other_memory: as the latest census has it.

    Args:
        script_root: folder of the user's script, for allocation sites.
        progress: where training stands.
        record, live, host: get the ledgers.
        residue: gets what stays on the devices after a backward.
    """

    script_root: str | None
    progress: TrainingProgress
    record: SessionRecord
    live: LiveState
    host: HostWatch
    residue: Callable[[Sequence[Finding]], None]
    baselines: dict[int, int] = field(default_factory=dict)
    last: Sequence[Ledger] = ()
    other_memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    _host_reading: HostReading | None = None
    _due_s: float | None = None
    _tensors: int = 0
    _cost_s: float = 0.0
    _went_on: bool = False
    _of_step: dict[str, int] = field(default_factory=dict)
    _at_end: dict[str, int] | None = None

    @property
    def taken(self) -> bool:
        """Whether ledgers have been taken."""
        return self._due_s is not None

    def is_due(self) -> bool:
        """Return whether new ledgers are due. The first are taken at a census that has another reason."""
        return self._due_s is not None and self.progress.elapsed() >= self._due_s

    def ask(self) -> None:
        """Make ledgers due now."""
        self._due_s = 0.0

    @property
    def outdated(self) -> bool:
        """Whether the program has gone on since the last ledgers, and ended with its memory still in use."""
        cheap = self._cost_s <= max(_LAST_S, _LAST_SHARE * self.progress.elapsed())
        at_end = self._at_end or {}
        there = all(at_end.get(name, 0) >= _STILL_THERE * used for name, used in self._of_step.items())
        return self._went_on and cheap and there

    def at_mark(self, mark: MarkPoint) -> None:
        """Note what is in use, and what was outside the allocator of each device when it was first seen."""
        in_use = {each.device: each.allocated for each in mark.readings if each.allocated is not None}
        if mark.name == "end":
            self._at_end = in_use
        elif mark.name in ("step", "time"):
            self._of_step, self._went_on = in_use, True
        for reading in mark.readings:
            if reading.outside is not None and reading.device.startswith("cuda:"):
                self.baselines.setdefault(int(reading.device[5:]), reading.outside)

    def before_census(self) -> None:
        """Read the host's classes of memory, which a census would disturb."""
        self._host_reading, self.other_memory = None, {}  # if reading fails, an old one must not be used
        try:
            self._host_reading = read_host()
            if self._host_reading is not None:
                self.other_memory = self._host_reading.other_memory()
        except Exception as error:
            if is_programs_exception(error):
                raise
            self.record.failed("read host", error)

    def take(self, view: CensusView) -> None:
        """Take the ledgers from an open census.

        Not at the end, if functions have returned and released the tensors that they held.
        """
        started = time.perf_counter()
        census = view.census()
        lasting = [storage for storage in census.storages if storage.owner in _LASTING]
        tensors = sum(storage.nbytes for storage in lasting or census.storages)
        if self.taken and self._at_end is not None and tensors < _STILL_THERE * self._tensors:
            return
        self._tensors = tensors
        if census.partial is not None:
            self.record.note_once(f"a census is partial: {census.partial}; some holders are unknown")
        if is_rocm():
            self.record.note_once(
                "this torch is built for ROCm, where memtriage was never tried: counters and holders come "
                "from torch.cuda; the driver's figures come from NVML and are missing"
            )
        not_counted = uncounted(storage.device for storage in census.storages)
        if not_counted:
            self.record.note_once(
                f"device memory of {', '.join(not_counted)} is not counted or judged: memtriage counts CUDA "
                "devices, CPU tensors and the host. memtriage.census() lists the tensors there"
            )
        unread = unread_saved_tensors() if census.nodes else None
        if unread is not None:
            self.record.note_once(unread)
        ledgers = take_ledgers(
            census.storages,
            self.baselines,
            read_devices(self.script_root),
            self._host_reading,
            census.parameters,
        )
        self.last = ledgers
        if self._host_reading is not None:
            self.other_memory = self._host_reading.other_memory(ledgers[-1].rows)
        self.live.ledgers(ledgers, self.progress.elapsed())
        job = [take_job_ledger()] if descendants() else []
        for ledger in [*ledgers, *job]:
            ledger.step = self.progress.position.step
            self.record.write("ledger", ledger)
        self.host.at_census(view, self._host_reading)
        self.residue(left_after_backward(census.storages, self.progress.position.step))
        self._cost_s = census.seconds + time.perf_counter() - started
        self._due_s = self.progress.elapsed() + self._cost_s / _LEDGER_SHARE
        self._went_on = False
