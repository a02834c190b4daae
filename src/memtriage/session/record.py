"""A rank's record as the session writes it: findings, notes, and which parts of the watch failed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from memtriage.model.evidence import EvidenceLine
from memtriage.model.findings import Finding
from memtriage.observe.exceptions import summary_of
from memtriage.observe.foreign import is_programs_exception
from memtriage.session.signals.own_work import do_own_work
from memtriage.store.records import EVIDENCE, Note, RecordedFinding
from memtriage.store.writer import RankWriter


class SessionRecord(RankWriter):
    """A `RankWriter` shared by the parts of a session."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._noted: set[str] = set()

    def evidence(self, line: EvidenceLine) -> None:
        """Write what was observed, for the judgment of growth."""
        self.write(EVIDENCE[type(line)], line)

    def note(self, text: str) -> None:
        self.write("note", Note(text=text))

    def note_once(self, text: str) -> None:
        """Write a note unless the record already has one with this text."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def failed(self, where: str, error: BaseException) -> None:
        """Note that a part of the watch failed, once per text."""
        self.note_once(f"memtriage could not do all of its work ({where}): {summary_of(error)}")

    def findings(self, findings: Iterable[Finding], *, final: bool) -> None:
        """Write findings; one that is not final may be withdrawn by the end of the run."""
        for finding in findings:
            fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
            self.write("finding", RecordedFinding(**fields, final=final))


class HasRecord(Protocol):
    """A part of the watch that notes its failures in the record."""

    record: SessionRecord


Part = TypeVar("Part", bound=HasRecord)
P = ParamSpec("P")


def never_raises(method: Callable[Concatenate[Part, P], None]) -> Callable[Concatenate[Part, P], None]:
    """Turn exceptions of a method into notes: the watched program must not fail because of the watch."""

    @functools.wraps(method)
    def guarded(part: Part, /, *args: P.args, **kwargs: P.kwargs) -> None:
        def attempt() -> None:
            try:
                method(part, *args, **kwargs)
            except (Exception, SystemExit) as error:
                if is_programs_exception(error):
                    raise
                with suppress(Exception):  # the program continues even if no note can be written
                    part.record.failed(method.__name__.strip("_").replace("_", " "), error)

        do_own_work(attempt)

    return guarded
