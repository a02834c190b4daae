"""The page of the record has a table of each type of line, with every key of it."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest

from memtriage.model.census import GroupDetail
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen, Readings, Situation
from memtriage.model.marks import Mark
from memtriage.model.position import TrainingPosition
from memtriage.store.records import SCHEMA, End, HostSampleLine, RecordKind, Start
from support.documents import ROOT

PAGE = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^##+ (.+)\n((?:(?!#).*\n?)*)", PAGE, re.MULTILINE))
TYPES = {
    "Readings": Readings,
    "Census": CensusSeen,
    "Holder": HolderSeen,
    "Data": DataSeen,
    "Details": GroupDetail,
    "Situation": Situation,
    "Position": TrainingPosition,
    "Start": Start,
    "Mark": Mark,
    "Host": HostSampleLine,
    "End": End,
}


def first_cells(text: str) -> list[str]:
    """The names in the first cell of each row of a table."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("heading", TYPES)
def test_a_table_has_every_key_of_its_type(heading: str) -> None:
    assert first_cells(SECTIONS[heading]) == [field.name for field in msgspec.structs.fields(TYPES[heading])]


def test_every_type_of_line_is_listed() -> None:
    kinds = first_cells(PAGE.partition("\n## ")[0])
    assert sorted(kinds) == sorted(get_args(RecordKind))


def test_every_version_of_the_format_is_described() -> None:
    versions = re.findall(r"^\| (\d+) \|", SECTIONS["Versions"], re.MULTILINE)
    assert [int(version) for version in versions] == list(range(1, SCHEMA + 1))
