"""What is put around the lines of a log comes off, and tells who wrote them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.grammar.lines import read_line, read_lines

TEXT = "RuntimeError: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("prefix", "source"),
    [
        ("", None),
        ("[rank3]: ", "rank 3"),
        ("[rank12]:[E1120 12:33:44.100200300 ", "rank 12"),
        ("[default0]:", "rank 0"),
        ("Rank 7: ", "rank 7"),
        (" 3: ", "rank 3"),
        ("[1,5]<stderr>:", "rank 5"),
        ("(RayTrainWorker pid=1234, ip=10.0.0.3) ", "RayTrainWorker 1234"),
        ("(VllmWorkerProcess pid=99) ERROR 12-20 20:25:46 ", "VllmWorkerProcess 99"),
        ("(Worker_TP3 pid=5151) ", "rank 3"),
        ("[pod/train-3/pytorch] ", "pod train-3"),
        ("worker-1  | ", "worker-1"),
        ("2024-11-20 12:33:44,123 ERROR ", None),
        ("2024-11-20T12:33:44.123456Z [rank1]: ", "rank 1"),
        ("[2023-01-15 19:09:52,477] [INFO] ", None),
        ("Nov 20 12:33:44 node7 kernel: ", None),
        ("[2059991.491542] ", None),
        ("[Thu Nov 20 12:33:40 2025] ", None),
        ("2024-04-29T14:55:41,679700+02:00 ", None),
        ("\x1b[31m[rank2]:\x1b[0m \x1b[1m", "rank 2"),
        ("(Trainer pid=7) [rank4]: ", "rank 4"),
    ],
)
def test_prefixes(prefix: str, source: str | None) -> None:
    line = read_line(9, f"{prefix}{TEXT}\r")
    assert (line.number, line.text, line.source) == (9, TEXT, source)
    assert line.bare == (prefix == "")


@pytest.mark.parametrize(
    "text", [TEXT, "THCudaCheck FAIL file=x line=58 error=2 : out of memory", "137 files"]
)
def test_a_line_without_a_prefix_stays(text: str) -> None:
    line = read_line(1, text)
    assert (line.text, line.source, line.bare) == (text, None, True)


def test_lines_are_numbered_from_the_first() -> None:
    assert [(line.number, line.text) for line in read_lines("a\n[rank1]: b\n")] == [(1, "a"), (2, "b")]
    assert [line.number for line in read_lines("a\r\nb\rc", 7)] == [7, 8, 8]


@settings(deadline=None)
@given(st.text())
def test_any_line_is_read(text: str) -> None:
    assert len(read_line(1, text).text) <= len(text)
