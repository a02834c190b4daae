"""A run as one file, to attach to an issue: what `memtriage report` needs of the records of its ranks."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec

from memtriage.store.reader import RankRecord, RunRecord
from memtriage.store.records import EVIDENCE, Note, RecordedFinding, RecordKind, line_of


def write_bundle(run: RunRecord, path: Path) -> None:
    """Write the records of a run into one compressed file, which is read like the record of one rank.

    Raises:
        OSError: it cannot be written.
    """
    with gzip.open(path, "wb") as file:
        for rank in run.ranks:
            for kind, line in _lines(rank):
                file.write(line_of(kind, line))


def _lines(rank: RankRecord) -> Iterator[tuple[RecordKind, msgspec.Struct]]:
    yield "start", rank.start
    for mark in rank.marks:
        yield "mark", mark
    for sample in rank.host:
        yield "host", sample
    for line in rank.evidence:
        yield EVIDENCE[type(line)], line
    for ledger in rank.ledgers.values():
        yield "ledger", ledger
    for note in rank.notes:
        yield "note", Note(text=note)
    for finding in rank.findings:
        fields = msgspec.structs.asdict(finding)
        yield "finding", RecordedFinding(**fields, final=rank.end is not None)
    if rank.end is not None:
        yield "end", rank.end
