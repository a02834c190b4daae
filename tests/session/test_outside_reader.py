"""A process of the watch's own reads others, and the program does not see it."""

from __future__ import annotations

import errno
import os
import select
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from memtriage.outside.python_layout import layout_of
from memtriage.session import outside_reader
from memtriage.session.outside_reader import OutsideReader, ReadReply, ReadRequest
from support.jobs import job_of

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)

JOB = """
import torch
def main():
    kept = [torch.zeros(1000) for _ in range(10)]
    print("ready", flush=True)
    input()
main()
"""


def next_reply(reader: OutsideReader) -> ReadReply:
    """The next answer, however long the reading takes."""
    assert reader._replies is not None
    answers = select.poll()  # as any number of descriptors may be open before
    answers.register(reader._replies.number, select.POLLIN)
    while not (replies := reader.replies()):
        answers.poll()
    return replies[0]


def test_it_reads_a_process_and_is_no_child_of_the_program() -> None:
    reader = OutsideReader()
    try:
        with job_of(JOB) as job:
            others = {child.pid for child in psutil.Process().children(recursive=True)}
            reader.ask(ReadRequest(job.pid))
            assert {child.pid for child in psutil.Process().children(recursive=True)} == others
            reply = next_reply(reader)
            assert reply.error is None and reply.census is not None
            (kept,) = [seen for seen in reply.census.holders if seen.anchor[-1].name == "*"]
            assert (kept.nbytes, kept.storages) == (40_000, 10)
        with pytest.raises(FileNotFoundError):
            reader.ask(ReadRequest(job.pid))
    finally:
        reader.stop()


def test_modules_beside_the_script_are_not_imported_and_get_no_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue", "socket", "msgspec", "rich"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is the code of the program')")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    reader = OutsideReader()
    try:
        with job_of("input()", says="") as job:
            reader.ask(ReadRequest(job.pid))
            reply = next_reply(reader)
    finally:
        reader.stop()
    assert reply.error is not None and "has not loaded torch" in reply.error
    assert sorted(path.suffix for path in tmp_path.rglob("*")) == [".py"] * 4


def test_memory_that_may_not_be_opened_says_why_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    reader = OutsideReader()
    monkeypatch.setattr(outside_reader.os, "open", refused)
    assert f"Permission denied (errno {errno.EACCES}); " in (reader.ask(ReadRequest(os.getpid())) or "")
    assert reader._requests is None


def test_a_reading_process_that_fails_leaves_its_last_words_as_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outside_reader, "_CODE", "raise SystemExit('no room')  # {path!r}")
    reader = OutsideReader()
    assert reader.ask(ReadRequest(os.getpid())) is None
    reply = next_reply(reader)
    assert reply.pid == os.getpid() and (reply.error or "").endswith("has ended: no room")
    assert reader.ask(ReadRequest(os.getpid())) == reply.error


def test_nothing_is_open_once_it_is_stopped() -> None:
    before = set(os.listdir("/proc/self/fd"))
    reader = OutsideReader()
    reader.ask(ReadRequest(os.getpid()))
    reader.stop()
    assert set(os.listdir("/proc/self/fd")) == before
