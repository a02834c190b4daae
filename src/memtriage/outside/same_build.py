"""Whether another process runs the same build of Python and torch, and where the same objects are in it.

Each process loads files at different addresses, but offsets inside a file are the same. So an address here,
such as that of the type `list`, gives the address of the same object in the other process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from memtriage.outside.memory import ForbiddenError, Mapping, OtherBuildError, OutsideError, read_maps

_COMPARED: Final = 1 << 16
"""Bytes that are compared at the start (headers, the id of the build) and the end of two files."""


class SharedFiles:
    """Files that this process and another one both have mapped.

    Raises:
        OutsideError: its Python is another build.
    """

    def __init__(self, pid: int, theirs: Sequence[Mapping]) -> None:
        self._pid = pid
        self._own = read_maps(os.getpid())
        self._theirs = theirs
        self._shifts: dict[str, int] = {}
        python = self._file_at(id(object))
        if self._their_path(python) is None:
            raise self._other_python()

    def require(self, files: Sequence[str], what: str) -> None:
        """Check that the other process has the same files mapped.

        Args:
            files: paths in this process.
            what: whose files they are, for the message.

        Raises:
            OutsideError: one is missing there, or is another build.
        """
        for path in files:
            if self._their_path(path) is None:
                raise self.other_build(
                    f"process {self._pid} has another build of {what} than this Python "
                    f"({os.path.basename(path)} differs)"
                )

    def theirs(self, own_address: int) -> int | None:
        """Return the other process's address of what is in a file here; None: it has no such file."""
        path = self._file_at(own_address)
        shift = self._shifts.get(path)
        if shift is None:
            there = self._their_path(path)
            if there is None:
                return None
            shift = self._shifts[path] = _base(self._theirs, there) - _base(self._own, path)
        return own_address + shift

    def own_files(self, *parts: str) -> list[str]:
        """Return files that are mapped here and have one of these texts in their names."""
        names = {mapping.path for mapping in self._own if mapping.path.startswith("/")}
        return sorted(name for name in names if any(part in os.path.basename(name) for part in parts))

    def other_build(self, text: str) -> OtherBuildError:
        """Return an error with the command that runs the reader in the interpreter of the other process."""
        try:
            python = interpreter_of(self._pid)
        except OSError:
            python = None
        command = f"{python or 'its own python'} -m memtriage census --pid {self._pid}"
        return OtherBuildError(f"{text}: install memtriage there, and run `{command}`", python)

    def _other_python(self) -> OutsideError:
        if not any("python" in os.path.basename(mapping.path) for mapping in self._theirs):
            return OutsideError(
                f"no Python was found in process {self._pid}; give the number of a training process"
            )
        return self.other_build(f"process {self._pid} runs another build of Python than this one")

    def _file_at(self, address: int) -> str:
        """Return the file that an address belongs to here; a file's zeroed data has no name of its own."""
        before: Mapping | None = None
        for mapping in self._own:
            if mapping.start > address:
                break
            if mapping.path or before is None or before.end != mapping.start:
                before = mapping
            else:
                before = Mapping(before.start, mapping.end, before.readable, before.shared, before.path)
        return "" if before is None or address >= before.end else before.path

    def _their_path(self, path: str) -> str | None:
        if not path.startswith("/"):
            return None
        name = os.path.basename(path)
        for there in dict.fromkeys(mapping.path for mapping in self._theirs):
            if os.path.basename(there) == name and _same_file(path, f"/proc/{self._pid}/root{there}"):
                return there
        return None


def _base(mappings: Sequence[Mapping], path: str) -> int:
    return min(mapping.start for mapping in mappings if mapping.path == path)


def _same_file(own: str, other: str) -> bool:
    """Whether two files are one, or equal copies as far as their size, start and end tell."""
    try:
        with open(own, "rb") as mine, open(other, "rb") as its:
            one, two = os.fstat(mine.fileno()), os.fstat(its.fileno())
            if (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino):
                return True
            if one.st_size != two.st_size or mine.read(_COMPARED) != its.read(_COMPARED):
                return False
            mine.seek(-min(_COMPARED, one.st_size), os.SEEK_END)
            its.seek(-min(_COMPARED, one.st_size), os.SEEK_END)
            return mine.read() == its.read()
    except PermissionError:
        raise ForbiddenError(f"{other} may not be read") from None
    except OSError:
        return False


def interpreter_of(pid: int) -> str:
    """Return the path that started the interpreter of a process: that of its virtual environment, if any.

    Raises:
        OSError: it cannot be read.
    """
    program = f"/proc/{pid}/exe"
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        first = os.fsdecode(file.read().split(b"\0")[0])
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = file.read().split(b"\0")
    environments = [os.fsdecode(v.partition(b"=")[2]) for v in variables if v.startswith(b"VIRTUAL_ENV=")]
    started = [os.path.join(os.readlink(f"/proc/{pid}/cwd"), first)] if "/" in first else []
    for python in (*started, *(f"{environment}/bin/python" for environment in environments)):
        if os.path.exists(python) and os.path.samefile(python, program):
            return python
    return os.readlink(program)
