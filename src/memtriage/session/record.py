"""A rank's record as the session writes it: findings, notes, and what failed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from memtriage.model.findings import Finding
from memtriage.store.records import Note, RecordedFinding
from memtriage.store.writer import RankWriter


class SessionRecord(RankWriter):
    """A `RankWriter` that the parts of a session share."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._noted: set[str] = set()

    def note(self, text: str) -> None:
        self.write("note", Note(text=text))

    def note_once(self, text: str) -> None:
        """Note something that may happen again, once for each text."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def failed(self, where: str, error: BaseException) -> None:
        """Note that a part of the watch failed, once for each text."""
        self.note_once(f"memtriage could not do all of its work ({where}): {type(error).__name__}: {error}")

    def findings(self, findings: Iterable[Finding], *, final: bool) -> None:
        """Write findings; those that are not final may still turn out to be none."""
        for finding in findings:
            fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
            self.write("finding", RecordedFinding(**fields, final=final))
