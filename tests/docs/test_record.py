"""The pages of the record list each type of line, and every key of it in the words of its docstring."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest

from memtriage.store.records import SCHEMA, RecordKind
from support import record_keys
from support.documents import ROOT

PAGE = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("heading", record_keys.TYPES)
def test_every_key_of_a_type_is_described(heading: str) -> None:
    kind = record_keys.TYPES[heading]
    assert set(record_keys.described(kind)) == {field.name for field in msgspec.structs.fields(kind)}


def test_the_page_of_the_keys_is_up_to_date() -> None:
    page = (ROOT / "docs" / "record-keys.md").read_text(encoding="utf-8")
    assert page == record_keys.page(), "python tests/support/record_keys.py > docs/record-keys.md"


def test_every_type_of_line_is_listed() -> None:
    kinds = re.findall(r"^\| \[?`(\w+)`", PAGE, re.MULTILINE)
    assert sorted(kinds) == sorted(get_args(RecordKind))


def test_every_version_of_the_format_is_described() -> None:
    versions = re.findall(r"^\| (\d+) \|", PAGE.partition("\n## Versions")[2], re.MULTILINE)
    assert [int(version) for version in versions] == list(range(1, SCHEMA + 1))
