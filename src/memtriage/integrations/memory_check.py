"""Check a test's memory requirements against a block of code, for the pytest plugin."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from memtriage.account.census import take_census
from memtriage.diagnose.cells import changes
from memtriage.diagnose.growth.evidence import ENOUGH_MARKS
from memtriage.diagnose.verdict import reasons_not_judged
from memtriage.model.cell import HolderChange
from memtriage.model.census import Census
from memtriage.model.findings import GROWING, Finding
from memtriage.model.paths import SegmentKind, has
from memtriage.model.report import RankCount, RunReport
from memtriage.model.units import parse_size, size
from memtriage.observe import cuda
from memtriage.observe.host import rss
from memtriage.observe.host_peak import PeakMeter
from memtriage.process import active

if TYPE_CHECKING:
    from memtriage.session.run import Watch

GROWTH_STEPS: Final = ENOUGH_MARKS
"""Steps (or micro-batches of one step) that growth is judged from."""
RESIDUE_FLOOR: Final = 64 << 10
"""Bytes that one holder may keep past the end: a few scalars, a random generator's state."""


class MemoryCheck:
    """One block of code and what is demanded of it.

    Args:
        no_growth: nothing grows from step to step, or from micro-batch to micro-batch.
        max_peak: the most that may be in use at once, above what is in use when the block begins: of the
            allocator on each CUDA device that is in use at its end, else of the process (resident bytes).
            A number of bytes or a text as `2GiB`.
        no_residue: no holder keeps more than `RESIDUE_FLOOR` of new storages alive when the block has ended
            and garbage is collected.

    Raises:
        ValueError: `max_peak` is no size, or nothing is demanded.
        TypeError: a demand that does not exist.

    Limits: with `max_peak` the peak statistics of the CUDA devices begin again
    (`torch.cuda.reset_peak_memory_stats`), and so does the process's high-water mark.
    """

    def __init__(
        self, *, no_growth: bool = False, max_peak: int | str | None = None, no_residue: bool = False
    ) -> None:
        self._no_growth = no_growth
        self._max_peak = None if max_peak is None else parse_size(max_peak, "max_peak")
        self._no_residue = no_residue
        if not no_growth and max_peak is None and not no_residue:
            raise ValueError(
                "nothing is demanded; expected no_growth=True, max_peak=<size> or no_residue=True"
            )
        self._before: Census | None = None
        self._watch: Watch | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._meter: PeakMeter | None = None
        self._resident = 0
        self._allocated: dict[int, int] = {}

    def begin(self) -> None:
        """The block begins.

        Raises:
            RuntimeError: growth is to be judged in a process that is watched already.
        """
        if self._no_residue:
            gc.collect()
            self._before = take_census()
        if self._no_growth:
            self._begin_watch()
        if self._max_peak is not None:
            self._resident = rss() or 0
            self._meter = PeakMeter()
            self._meter.start()
            self._allocated = _restart_peaks()

    def end(self, *, judge: bool = True) -> list[str]:
        """Return what the block did against the demands, a text for each; none when all hold.

        Args:
            judge: False where the block failed by itself: everything is put back, nothing is said.
        """
        failures: list[str] = []
        if self._max_peak is not None:
            failures += self._peak_failures(self._max_peak)
        if self._watch is not None:
            failures += self._growth_failures(self._watch)
        if self._before is not None and judge:
            failures += _residue_failures(self._before)
        return failures if judge else []

    # --- growth ---------------------------------------------------------------------------------------------

    def _begin_watch(self) -> None:
        from memtriage.session.run import Watch

        self._directory = tempfile.TemporaryDirectory(prefix="memtriage-")
        watch = Watch(self._directory.name, quiet=True)
        try:
            watch.__enter__()
        except BaseException:
            self._directory.cleanup()
            raise
        self._watch = watch

    def _growth_failures(self, watch: Watch) -> list[str]:
        watch.__exit__(None, None, None)
        assert self._directory is not None
        self._directory.cleanup()
        report = watch.report
        if report is None:
            return ["memory: growth could not be judged: the watch came to no report"]
        growing = [finding for finding in report.findings if finding.kind in GROWING]
        if growing:
            from memtriage.report.run.terminal import findings_text

            proven = any(finding.certainty != "suspected" for finding in growing)
            grows = "memory grows" if proven else "memory seems to grow"
            return [f"{grows}, and the test demands that nothing does\n{findings_text(report, growing)}"]
        return _not_judged(report)

    # --- peak -----------------------------------------------------------------------------------------------

    def _peak_failures(self, limit: int) -> list[str]:
        assert self._meter is not None
        resident = self._meter.stop() - self._resident
        peaks = _peaks(self._allocated) or {"the process": resident}
        return [
            f"memory: the peak on {place} is {size(peak)} ({peak:,} bytes) above what was in use before; the "
            f"test demands at most {size(limit)} ({limit:,} bytes)"
            for place, peak in peaks.items()
            if peak > limit
        ]


class MemoryProbe:
    """The fixture `memory`: demands on a part of a test, and steps for what has no optimizer."""

    @contextmanager
    def check(
        self, *, no_growth: bool = False, max_peak: int | str | None = None, no_residue: bool = False
    ) -> Generator[None]:
        """Hold demands against a block; see `MemoryCheck` for them.

        Raises:
            AssertionError: a demand was not met; its text is the finding.
            ValueError: `max_peak` is no size, or nothing is demanded.
            RuntimeError: growth is to be judged in a process that is watched already.
        """
        __tracebackhide__ = True
        check = MemoryCheck(no_growth=no_growth, max_peak=max_peak, no_residue=no_residue)
        check.begin()
        passed = False
        try:
            yield
            passed = True
        finally:
            failures = check.end(judge=passed)
        if failures:
            raise AssertionError("\n\n".join(failures))

    def repeat(self, call: Callable[[], object], times: int = 2 * GROWTH_STEPS) -> None:
        """Call something again and again, each time as one step, so that growth can be judged.

        Args:
            call: anything without arguments; what it returns is dropped.
            times: how often.
        """
        for _ in range(times):
            call()
            if active.session is not None:
                active.session.user_step()


def _residue_failures(before: Census) -> list[str]:
    gc.collect()
    came, _ = changes(before, take_census())
    findings = [
        _residue(change)
        for change in came
        if change.bytes >= RESIDUE_FLOOR and not has(change.holder_path, SegmentKind.NOT_SEARCHED)
    ]
    if not findings:
        return []
    return [f"memory stays, but the test must leave none\n{_in_words(findings)}"]


def _residue(change: HolderChange) -> Finding:
    more = f"{change.count} storages that were not there before are alive after it"
    return Finding(
        kind="residue",
        device=change.device,
        bytes=change.bytes,
        holder_path=change.holder_path,
        mechanism=more if change.count > 0 else "its storages are larger than before",
        fix="release them, or keep them in a fixture, which is set up before the limits apply",
        playbook="M19",
    )


def _in_words(findings: Sequence[Finding]) -> str:
    from memtriage.report.run.terminal import findings_text

    report = RunReport(
        verdict="residue",
        steps=0,
        findings=list(findings),
        marks=[],
        ledger={},
        ranks=RankCount(seen=1, of=1),
    )
    return findings_text(report, findings)


def _not_judged(report: RunReport) -> list[str]:
    if report.verdict == "error":
        return ["memory: growth could not be judged; see the notes that `memtriage run` gives for this test"]
    reasons = reasons_not_judged(report.findings, report.judged)
    if report.verdict != "not_judged" and not reasons:
        return []
    return [
        f"memory: no_growth cannot be judged: {'; '.join(reasons) or 'no step was seen'}. Train longer, or "
        "repeat what has no optimizer step with the fixture's `memory.repeat(function)`"
    ]


def _restart_peaks() -> dict[int, int]:
    """Each device's allocated bytes, its peak set to that."""
    if not cuda.initialized():
        return {}
    import torch

    before = {}
    for device in cuda.devices():
        torch.cuda.reset_peak_memory_stats(device)
        before[device] = torch.cuda.memory_allocated(device)
    return before


def _peaks(before: dict[int, int]) -> dict[str, int]:
    if not cuda.initialized():
        return {}
    import torch

    peaks = {}
    for device in cuda.devices():
        peak = torch.cuda.max_memory_allocated(device)
        if peak:
            peaks[f"cuda:{device}"] = peak - before.get(device, 0)
    return peaks
