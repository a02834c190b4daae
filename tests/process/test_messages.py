"""Messages of the watch: to the standard error that was there at first, and never an exception."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from memtriage.process.messages import Messages, printable


def test_messages_never_raise_and_escape_what_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    Messages().say("a\033[2Jb")
    assert capsys.readouterr().err == "memtriage: a\\x1b[2Jb\n"
    assert printable("gr\u00fcn\n") == "gr\u00fcn\\n"
    assert printable("C:\\new 'quoted'") == "C:\\new 'quoted'"
    with open(os.devnull, "w") as closed:
        messages = Messages(closed)
    messages.say("lost")
    assert not messages.isatty()


def standard_error(path: str) -> int:
    """Make a file this process's standard error; returns the descriptor of the one before."""
    before = os.dup(2)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(number, 2)
    os.close(number)
    return before


def test_text_reaches_the_file_that_standard_error_was(tmp_path: Path, capfd: object) -> None:
    before = standard_error(str(tmp_path / "first"))
    try:
        messages = Messages(sys.__stderr__)
        assert messages.fileno() == 2
        messages.say("at first")
        standard_error(str(tmp_path / "second"))
        os.set_inheritable(2, False)  # as a file that the program opened itself
        messages.say("lost")
        with pytest.raises(OSError, match="no descriptor"):
            messages.fileno()
        os.set_inheritable(2, True)  # as a redirected standard error, which children get
        messages.say("redirected")
    finally:
        os.dup2(before, 2)
        os.close(before)
    assert (tmp_path / "first").read_text() == "memtriage: at first\n"
    assert (tmp_path / "second").read_text() == "memtriage: redirected\n"


def test_a_closed_standard_error_loses_the_text() -> None:
    before = os.dup(2)
    try:
        messages = Messages(sys.__stderr__)
        os.close(2)
        messages.say("lost")
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_a_stream_that_is_not_the_processes_own_is_written_to_and_flushed() -> None:
    class Stream(io.StringIO):
        encoding = "latin-1"
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    stream = Stream()
    messages = Messages(stream)
    assert messages.write("five5") == 5 and stream.getvalue() == "five5" and stream.flushed == 1
    assert messages.encoding == "latin-1" and Messages(io.BytesIO()).encoding == "utf-8"  # type: ignore[arg-type]
