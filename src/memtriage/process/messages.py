"""Messages that the watch prints while a program runs, to the original standard error."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

from memtriage.process.descriptors import identity_of
from memtriage.process.limits import surviving_writes
from memtriage.process.stdlib import os


def printable(text: str) -> str:
    """Return text in which what is not printable is written as an escape: it cannot move the cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def complain(speaker: str, text: object) -> None:
    """Print a warning to standard error; the text may contain names from outside."""
    Messages().write(f"{speaker}: {printable(str(text))}\n")


class Messages:
    """A text stream to the standard error of this process that never raises and never writes elsewhere.

    What the program does to `sys.stderr` later does not matter: it may capture it, replace it or set it to
    None. Where the stream is closed, or its descriptor has become another file, the text is lost; the record
    has it. A descriptor 2 that children inherit is a standard error that the program has redirected, and is
    written to. Nothing is left in the stream's buffer, which the interpreter flushes at its end and whose
    failure would change the exit status.

    Args:
        stream: where to write; `sys.stderr` as it is now by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._number: int | None = None
        standard = sys.__stderr__
        if standard is not None and self._stream is standard:
            with suppress(Exception):
                self._number = standard.fileno()
        self._file = None if self._number is None else identity_of(self._number)

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the text goes to a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except Exception:  # closed, or an object of the program's that has no such method
            return False

    def fileno(self) -> int:
        """The descriptor.

        Raises:
            OSError: there is none.
        """
        if self._number is None or not self._writable():
            raise OSError("no descriptor")
        return self._number

    def write(self, text: str) -> int:
        """Write text, at once."""
        with suppress(Exception), surviving_writes():  # closed, a full disk, a reader that has gone
            if self._number is None:
                if self._stream is not None:
                    self._stream.write(text)
                    self._stream.flush()
            elif self._writable():
                if self._stream is not None:
                    self._stream.flush()  # the program's text comes first
                data = memoryview(text.encode(self.encoding, "backslashreplace"))
                while data:
                    data = data[os.write(self._number, data) :]
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is kept back."""

    def say(self, text: str) -> None:
        """Write a line that begins with `memtriage:`."""
        self.write(f"memtriage: {printable(text)}\n")

    def _writable(self) -> bool:
        if self._number is None:
            return False
        identity = identity_of(self._number)
        if identity is None:
            return False
        return identity == self._file or os.get_inheritable(self._number)
