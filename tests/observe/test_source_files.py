"""A source file is parsed without a word, and what cannot be parsed is no error."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

from memtriage.observe.source_files import parse_file


def test_python_does_not_warn_of_a_file_again(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    file = tmp_path / "train.py"
    file.write_text("if True:\n    pattern = '\\.'\n")
    filters = list(warnings.filters)
    tree = parse_file(str(file))
    assert tree is not None and isinstance(tree.body[0], ast.If)
    assert list(recwarn) == []
    assert warnings.filters == filters


@pytest.mark.parametrize(
    "source", [None, b"def", b"\x00", b"#" * 2_000_001], ids=["missing", "wrong", "binary", "large"]
)
def test_what_cannot_be_parsed_is_none(tmp_path: Path, source: bytes | None) -> None:
    file = tmp_path / "train.py"
    if source is not None:
        file.write_bytes(source)
    assert parse_file(str(file)) is None
