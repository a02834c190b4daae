"""Writing a rank's record: one whole line a system call, so that SIGKILL cuts at most the last one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from memtriage.process.descriptors import Descriptor
from memtriage.process.messages import Messages
from memtriage.process.stdlib import os, threading
from memtriage.store.records import RecordKind, line_of

_CANNOT_WRITE: Final = (
    OSError, TypeError, ValueError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError
)  # fmt: skip
_FLAGS: Final = os.O_RDWR | os.O_APPEND


class RankWriter:
    """Appends lines to one rank's record.

    Nothing here raises into the training script: when the directory cannot be made, the disk is full or
    a value cannot be written, one warning goes to stderr, the line is lost and the run goes on.

    Threads may share a writer, and a signal handler may write while its own thread does. A forked child
    never writes: the record is its parent's. Nothing is flushed to the disk itself, so a crash of the
    machine (not of the process) can lose more than the last line. Where the program has closed the writer's
    descriptor, as daemons do, the record is opened again; a file of the program's is never written to.

    Attributes:
        path: the file.
        error: the first thing that went wrong; None while all is well.
        lost: lines that could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: str | None = None
        self.lost = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()  # re-entrant: a signal handler may interrupt a write and write
        self._file: Descriptor | None = None
        self._messages = Messages()
        self._line_open = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = Descriptor(os.open(path, _FLAGS | os.O_CREAT, 0o644))
            self._line_open = _ends_in_mid_line(self._file.number)
        except OSError as error:
            self._complain(error)

    def write(self, kind: RecordKind, record: msgspec.Struct | dict[str, Any]) -> None:
        """Append one line of type `kind`. Does nothing in a forked child or after `close`."""
        if self._file is None or os.getpid() != self._pid:
            return
        with self._lock:
            try:
                line = line_of(kind, record)
                self._append(b"\n" + line if self._line_open else line)
            except _CANNOT_WRITE as error:
                # The watched run must go on. Anything else is what another thread has raised here.
                self.lost += 1
                self._complain(error)

    def close(self) -> None:
        """Close the file. Later writes do nothing."""
        with self._lock:
            if self._file is not None and os.getpid() == self._pid:
                self._file.close()
            self._file = None

    def __enter__(self) -> RankWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        if not self._file.ours:
            self._file = self._opened_again(self._file)
        view = memoryview(line)
        while view:
            written = self._file.write(view)
            # Until the rest is out the file ends in mid-line, which a write after a full disk must close.
            self._line_open = written < len(view)
            view = view[written:]

    def _opened_again(self, closed: Descriptor) -> Descriptor:
        again = Descriptor(os.open(self.path, _FLAGS))
        if not again.is_same_file(closed):
            again.close()
            raise OSError("the record was replaced by another file")
        self._line_open = _ends_in_mid_line(again.number)
        return again

    def _complain(self, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = f"{type(error).__name__}: {error}"
        self._messages.say(f"cannot write {self.path} ({self.error}); going on")


def _ends_in_mid_line(fd: int) -> bool:
    """Return whether an existing record ends in a cut line, onto which nothing must be glued."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
