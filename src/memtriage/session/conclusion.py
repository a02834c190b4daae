"""The end of a watch: the findings, the verdict, and the last lines of the record."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from memtriage.diagnose.host.findings import host_findings, host_notes
from memtriage.diagnose.verdict import verdict
from memtriage.model.findings import Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.observe.host import host_peak
from memtriage.report.growth_words import findings_of, judged_in_words
from memtriage.session.batch_watch import BatchWatch
from memtriage.session.death_watch import DeathWatch
from memtriage.session.ends import allocator_peaks, exception_text
from memtriage.session.fragmentation_watch import FragmentationWatch
from memtriage.session.growth_watch import GrowthWatch
from memtriage.session.host_watch import HostWatch
from memtriage.session.live_state import LiveState
from memtriage.session.progress import TrainingProgress
from memtriage.session.record import SessionRecord, never_raises
from memtriage.session.residue import PhaseResidue
from memtriage.store.records import End


@dataclass(slots=True)
class Conclusion:
    """Judges what the parts of a watch have gathered, once the program has ended.

    Attributes:
        findings: what is wrong, the cause of death first; empty before `judge`.
        judged: by device, whether growth could be judged and how small a leak would have been detected.
        exception_text: the exception or signal that ended the program; None if it completed.
        died_of_memory: whether it ended because memory ran out.

    Args:
        rank: whose findings they are.
        progress: where training stands.
        record: gets the findings and the end.
        live: gets the leaks.
        growth, fragmentation, host, batches, death, residue: the evidence.
    """

    rank: int | None
    progress: TrainingProgress
    record: SessionRecord
    live: LiveState
    growth: GrowthWatch
    fragmentation: FragmentationWatch
    host: HostWatch
    batches: BatchWatch
    death: DeathWatch
    residue: PhaseResidue
    findings: list[Finding] = field(default_factory=list)
    judged: dict[str, Judged] = field(default_factory=dict)
    exception_text: str | None = None
    died_of_memory: bool = False
    _failed_to_judge: bool = True

    @property
    def verdict(self) -> Verdict:
        """The verdict on this rank; `error` if growth could not be judged because the watch failed."""
        word = verdict(self.findings, self.died_of_memory, self.judged)
        return "error" if word == "not_judged" and self._failed_to_judge else word

    def judge(
        self, exception: BaseException | None, memory_error: BaseException | None, failed: bool = False
    ) -> None:
        """Make the findings. If one judgment fails, the others are still made.

        Args:
            exception: what ended the program.
            memory_error: the out-of-memory error in it, if there is one.
            failed: whether the program failed by itself.
        """
        self.exception_text = None if exception is None else exception_text(exception)
        self.died_of_memory = memory_error is not None
        self._judge_growth(failed)
        self.findings += self.residue.findings()
        self._judge_fragmentation()
        self._judge_host()
        if memory_error is not None:
            self._judge_death(memory_error)
        else:
            self._judge_batches()

    def write(self, exit_code: int | None, devices: Iterable[str]) -> None:
        """Write the last evidence, the findings and the last line of the record.

        Args:
            exit_code: status that the program ends with.
            devices: those whose peaks go into the record.
        """
        self._write_evidence()
        self.record.findings(self.findings, final=True)
        end = End(
            verdict=self.verdict,
            steps=self.progress.position.step,
            exception=self.exception_text,
            exit_code=exit_code,
            time_s=round(self.progress.elapsed(), 3),
            device_limits=self.growth.limits,
            passing=self.growth.transient.most(),
            peak_rss=host_peak(),
            judged=self.judged,
        )
        try:
            end.peak_allocated, end.peak_reserved = allocator_peaks(devices)
        except Exception as error:
            self.record.failed("read peaks", error)
        self.record.write("end", end)

    @never_raises
    def _write_evidence(self) -> None:
        self.growth.write_readings(last=True)

    @never_raises
    def _judge_growth(self, failed: bool) -> None:
        judgment = self.growth.judged()
        self.findings = findings_of(judgment.leaks, self.rank)
        self.live.leaks(self.findings)
        self.judged = judged_in_words(
            judgment.judged,
            script_failed=failed,
            steps=self.progress.position.step,
            torch="torch" in sys.modules,
        )
        self._failed_to_judge = False

    @never_raises
    def _judge_fragmentation(self) -> None:
        self.findings += self.fragmentation.findings()

    @never_raises
    def _judge_host(self) -> None:
        evidence = self.host.conclude()
        for finding in host_findings(evidence):
            finding.rank = self.rank
            finding.step = self.progress.position.step if finding.step is None else finding.step
            self.findings.append(finding)
        for note in host_notes(evidence):
            self.record.note(note)

    @never_raises
    def _judge_batches(self) -> None:
        self.findings += self.batches.findings(self.progress.position)

    @never_raises
    def _judge_death(self, error: BaseException) -> None:
        finding = self.death.finding(error, self.findings)
        finding.rank = self.rank
        self.findings.insert(0, finding)
