"""The tables of offsets agree with the headers of the Python that they are for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from memtriage.outside.interpreter import check_self, measure
from memtriage.outside.python_layout import layout_of

_SOURCE = Path(__file__).parents[1] / "support" / "python_layout.c"
_INCLUDE = Path(sysconfig.get_path("include"))

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(not (_INCLUDE / "internal").is_dir(), reason="no headers of this Python")
def test_the_table_has_the_offsets_of_the_headers(tmp_path: Path) -> None:
    program = tmp_path / "offsets"
    folders = ("-I", str(_INCLUDE), "-I", str(_INCLUDE / "internal"))
    subprocess.run(["cc", *folders, "-o", str(program), str(_SOURCE)], check=True, capture_output=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    expected = {name: int(value) for name, value in (line.split() for line in lines)}
    layout = layout_of(sys.version_info[:2])
    assert len(expected) > 80
    assert {name: getattr(layout, name) for name in expected} == expected


def test_this_python_reads_itself() -> None:
    layout = layout_of(sys.version_info[:2])
    assert layout is not None
    check_self(layout, measure(layout))
