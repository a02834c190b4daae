"""A watch over a framework's training, from its first callback to its last: what the callbacks share."""

from __future__ import annotations

import atexit
import logging
import sys
from pathlib import Path

from memtriage.model.report import RunReport
from memtriage.process import active
from memtriage.session.run import Watch, WatchedProgram

_log = logging.getLogger("memtriage")


class WatchedTraining:
    """Watches from `begin` to `end`. Where the process is watched already (`memtriage run`), only marks.

    A framework that says nothing of errors leaves the watch on; it then ends with the process.
    """

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def begin(self, directory: Path | None, program: WatchedProgram | None = None) -> None:
        """Training begins.

        Args:
            directory: where the record goes, unless the process is watched already; None for the default.
            program: what is watched; by default what this process was started with.
        """
        if self._watch is None and (active.session is None or not active.session.running):
            self._watch = Watch(directory, quiet=True, program=program)
            self._watch.__enter__()
            atexit.register(self._at_exit)
        self.mark("train begin")

    def mark(self, name: str) -> None:
        """Something of the framework's has just ended."""
        if active.session is not None:
            active.session.mark(name)

    def end(self, error: BaseException | None = None) -> RunReport | None:
        """Training has ended; the report goes to the log.

        Args:
            error: what ended it.

        Returns:
            The report, where this began the watch, on the first rank.
        """
        watch, self._watch = self._watch, None
        self.mark("train end")
        if watch is None:
            return None
        atexit.unregister(self._at_exit)
        watch.__exit__(None if error is None else type(error), error, None)
        if watch.report is not None:
            _tell(watch.report, watch.folder)
        return watch.report

    def _at_exit(self) -> None:
        self.end(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


def _tell(report: RunReport, folder: Path) -> None:
    """The verdict and where the record is, in the log; every finding in full where there is one."""
    from memtriage.diagnose.ranks.merge import RunContext
    from memtriage.report.findings import fold
    from memtriage.report.run.terminal import findings_text
    from memtriage.report.run.words import VERDICTS, sentence

    said = sentence(report, RunContext(), fold(report.findings, [None] * len(report.findings)))
    text = f"memtriage: {VERDICTS[report.verdict][0]}: {said}; for all of it: memtriage report {folder}"
    if report.findings:
        _log.warning("%s\n%s", text, findings_text(report, report.findings))
    else:
        _log.info("%s", text)
