"""The tables of offsets agree with the headers of the Python that they are for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from memtriage.outside.interpreter import check_self, measure
from memtriage.outside.memory import OutsideError
from memtriage.outside.python_layout import layout_of, versions

_SOURCE = Path(__file__).parents[1] / "support" / "python_layout.c"
_INCLUDE = Path(sysconfig.get_path("include"))

RECORDED: dict[str, dict[str, int]] = json.loads(
    (Path(__file__).parents[1] / "data" / "python_offsets.json").read_text()
)
"""What the program above printed with the headers of CPython 3.11.7, 3.12.1 and 3.13.0."""

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


@pytest.mark.parametrize("version", RECORDED)
def test_the_tables_have_the_offsets_recorded_from_headers(version: str) -> None:
    major, minor = version.split(".")
    layout = layout_of((int(major), int(minor)))
    recorded = RECORDED[version]
    assert {name: getattr(layout, name) for name in recorded} == recorded


def test_what_no_header_has_differs_between_versions_as_measured() -> None:
    names = ("cframe_frame", "frame_stackpointer", "stack_tags", "number_tag_bits", "managed_values",
             "managed_tagged", "function_annotate")  # fmt: skip
    assert {
        minor: tuple(getattr(layout_of((3, minor)), name) for name in names) for minor in range(11, 15)
    } == {
        11: (8, None, 0, 0, -32, False, None),
        12: (0, None, 0, 3, None, True, None),
        13: (None, None, 0, 3, None, False, None),
        14: (None, 64, 3, 3, None, False, 120),
    }
    assert layout_of((3, 10)) is layout_of((3, 15)) is None
    assert versions() == ["3.11", "3.12", "3.13", "3.14"]


@pytest.mark.parametrize(
    "name",
    ["list_items", "tuple_items", "dict_keys", "keys_entries", "text_length", "text_ascii", "deque_left",
     "deque_bound", "lru_bound", "type_flags", "type_mro", "type_name", "type_basic_size",
     "member_definition", "definition_offset", "function_closure", "function_defaults", "code_name",
     "code_values", "frame_code",
     "frame_owner", "generator_frame", "thread_frame", "interpreter_threads", "managed_dict",
     "collector_head"],
)  # fmt: skip
def test_a_wrong_offset_is_noticed_before_anything_is_read(name: str) -> None:
    layout = layout_of(sys.version_info[:2])
    assert layout is not None
    wrong = replace(layout, **{name: getattr(layout, name) + 8})
    with pytest.raises(OutsideError, match="cannot be read from outside"):
        check_self(wrong, measure(layout))


def test_this_python_reads_itself() -> None:
    layout = layout_of(sys.version_info[:2])
    assert layout is not None
    check_self(layout, measure(layout))
