"""Copies of this process that work for it, while it goes on.

A copy is made by `clone` without an exit signal: nobody is told that it ends, `wait` does not see it, and no
at-fork handler runs. The program stands still while its page tables are copied: some 10 ms per GiB. What
either side writes to later is then copied page by page.

Only the calling thread exists in a copy. What other threads of the program were in the middle of stays so
there: a lock of theirs is never released. The interpreter's lock, and the request of a waiting thread for it,
are reset; for all else a copy is disposable: it has a limit of processor time, it is killed when it is late
or its parent ends, and after two lost ones no more are made. Its work must not call CUDA, start threads,
import, print, or run code of the program.
"""

from __future__ import annotations

import ctypes
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat, starmap
from typing import Any, Final

from memtriage.process.collector import collector_paused
from memtriage.process.descriptors import Descriptor
from memtriage.process.stdlib import os, time

with suppress(ImportError):  # Windows, where no copies are made
    import resource

_CLONE: Final = {"x86_64": 56, "aarch64": 220}
"""Number of the system call."""
_CLONE_PARENT_SETTID: Final = 0x100000
_ALL_CHILDREN: Final = 0x40000000  # __WALL: `wait` leaves children without an exit signal out
_PR_SET_PDEATHSIG: Final = 1
_REQUEST: Final = {
    (3, 11): ("interpreter", 100, 8),
    (3, 12): ("interpreter", 368, 8),
    (3, 13): ("thread", 24, 1),
}
"""Where CPython keeps the flags that make a thread give up the interpreter's lock: `eval_breaker` with
`gil_drop_request`, later the lowest byte of a thread's own `eval_breaker`. Structure, offset and bytes."""
_SEARCHED: Final = 16384
_CPU_S: Final = 60
"""Processor time that a copy may take."""
_NICE: Final = 5
_EACH_S: Final = 0.05
_ASLEEP: Final = 40
"""A copy that is asleep at so many looks in a row, one each `_EACH_S`, is killed."""
_MOST_LOST: Final = 2

_lost = 0
_living: dict[int, Copy] = {}


class Copy:
    """A copy at work. Its result must be asked for: that also ends it.

    Attributes:
        pid: the copy's process.
    """

    def __init__(self, pid: int, result: Descriptor) -> None:
        self.pid, self._result = pid, result
        _living[pid] = self

    def result(self, within_s: float) -> bytes | None:
        """Wait for what the work returned; None if it failed, waits itself for 2 s, or took longer.

        None, too, if the program has closed all descriptors meanwhile.
        """
        global _lost
        # Nothing else reaps it, so that its number is not used again until then.
        ended, until, asleep = None, time.monotonic() + within_s, 0
        try:
            while ended is None and asleep < _ASLEEP and time.monotonic() < until:
                time.sleep(_EACH_S)
                asleep = asleep + 1 if self._sleeps() else 0
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | _ALL_CHILDREN)
            if ended is None:
                os.kill(self.pid, signal.SIGKILL)
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | _ALL_CHILDREN)
            if ended is None or ended.si_code != os.CLD_EXITED:
                _lost += 1
                return None
            if ended.si_status or not self._result.ours:
                return None
            return os.pread(self._result.number, os.fstat(self._result.number).st_size, 0)
        except ChildProcessError:  # the program waits for children of every kind
            return None
        finally:
            self.close()

    def _sleeps(self) -> bool:
        """Whether it waits: it has nothing to wait for but a lock that nobody will release."""
        with open(f"/proc/{self.pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"S"

    def close(self) -> None:
        """Close its descriptor."""
        del _living[self.pid]
        self._result.close()


def living() -> frozenset[int]:
    """Return the processes of the copies that are at work: they are none of the program's children."""
    return frozenset(_living)


def copies_are_made() -> bool:
    """Whether `work_in_copy` makes copies here, unless the system refuses."""
    return _flags_and_locks() is not None


def work_in_copy(work: Callable[[], bytes]) -> Copy | None:
    """Make a copy of this process that does the work, while the calling thread goes on.

    Args:
        work: called in the copy. What it raises is lost, with its result.

    Returns:
        None where no copy can be made: on another system than Linux with glibc, another interpreter than
        CPython 3.11 to 3.13, where the system refuses, or after two copies were lost.
    """
    known = _flags_and_locks()
    if known is None:
        return None
    try:
        result = Descriptor(os.memfd_create("memtriage", os.MFD_CLOEXEC))
    except OSError:
        return None
    pid, parent = ctypes.c_int(-1), os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with collector_paused():
            if _clone(pid, known):
                _work(work, result.number, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid.value < 0:
        result.close()
        return None
    return Copy(pid.value, result)


def _clone(pid: ctypes.c_int, known: list[tuple[ctypes.c_void_p, int, ctypes.c_size_t]]) -> bool:
    """Return whether this is the copy, where the flags and locks have been set to zero.

    All in one C call: between two instructions of Python code, the copy would hand the interpreter's lock
    over to a thread that is not there.
    """
    arguments = (
        _CLONE[os.uname().machine],
        ctypes.c_ulong(_CLONE_PARENT_SETTID),
        None,
        ctypes.byref(pid),
        None,
        None,
    )
    pids = starmap(_libc.syscall, [arguments])
    in_copy: dict[int, list[tuple[ctypes.c_void_p, int, ctypes.c_size_t]]] = {0: known}
    return bool(list(starmap(_libc.memset, chain.from_iterable(map(in_copy.get, pids, repeat([]))))))


def _work(work: Callable[[], bytes], result: int, parent: int) -> None:
    """Work in the copy, with all signals blocked, and end it."""
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.nice(_NICE)
            os.closerange(0, result)  # sockets, locks of files and devices would outlive a killed parent
            os.closerange(result + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            data = memoryview(work())
            while data:
                data = data[os.write(result, data) :]
            status = 0
    finally:
        os._exit(status)


def _flags_and_locks() -> list[tuple[ctypes.c_void_p, int, ctypes.c_size_t]] | None:
    """Return what a copy sets to zero, as arguments of `memset`; None if no copy is to be made here.

    CPython's lock begins with the switch interval, the thread that has it and the number 1, and goes on with
    a condition and a mutex, twice. What other threads did to these does not end in a copy.
    """
    version, with_lock = sys.version_info[:2], getattr(sys, "_is_gil_enabled", lambda: True)()
    if _libc is None or _lost >= _MOST_LOST or version not in _REQUEST or not with_lock:
        return None
    machine = os.uname().machine
    if machine not in _CLONE:
        return None
    _libc.PyInterpreterState_Get.restype = _libc.PyThreadState_Get.restype = ctypes.c_void_p
    structures = {"interpreter": _libc.PyInterpreterState_Get(), "thread": _libc.PyThreadState_Get()}
    runtime = ctypes.addressof(ctypes.c_char.in_dll(_libc, "_PyRuntime"))
    around = runtime if version == (3, 11) else structures["interpreter"]
    begins = struct.pack("<QQi", round(1e6 * sys.getswitchinterval()), structures["thread"], 1)
    seen = ctypes.string_at(around, _SEARCHED)
    if seen.count(begins) != 1:
        return None
    locks = around + seen.index(begins) + 32
    within, offset, size = _REQUEST[version]
    of_locks = 2 * (48 + (40 if machine == "x86_64" else 48))
    zeroed = ((structures[within] + offset, size), (locks, of_locks))
    return [(ctypes.c_void_p(at), 0, ctypes.c_size_t(nbytes)) for at, nbytes in zeroed]


def _c_library() -> Any:
    """Return glibc and CPython, to be called with the interpreter's lock held; None on another system."""
    try:
        return ctypes.PyDLL(None) if os.confstr("CS_GNU_LIBC_VERSION") else None
    except (AttributeError, OSError, ValueError):
        return None


_libc: Final = _c_library()


def _forget_in_child() -> None:
    for copy in list(_living.values()):
        copy.close()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_in_child)
