"""A small process that sends a termination signal again if the watched process cannot act on it.

A Python signal handler runs only between two bytecodes. While native code hangs, nothing happens after the
signal is delivered, although the unwatched process would have died. So `TerminationGuard` removes its handler
at the first delivery (SA_RESETHAND). This process reads of that delivery from the pipe of
`signal.set_wakeup_fd`. If there is no acknowledgement, it sends the signal again, which kills. After one, the
handler is installed again while the report is written: then it may take two.

The watchdog is not a child of the watched process (it is forked twice), so `os.wait()` in the program and
counts of its children do not see it. It ends when the pipe closes, or when the watched process is gone while
a forked child still holds the pipe.

This file imports the standard library only: it is also run as a script, by `python -I -S`.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time

GUARDED = (signal.SIGTERM, signal.SIGHUP)
"""The signals that the watchdog repeats; bytes of other signals in the pipe are skipped."""

ACKNOWLEDGED = 0x80
"""Byte from the Python handler: it is running and writing the report. No signal has this number."""

RELEASED = 0x81
"""Byte from the guard at its end: the watchdog is no longer needed."""

POLL_S = 1.0
"""How often the watchdog checks whether the watched process still runs, in case the pipe stays open."""

_AGAIN_S = 0.05
_STARTUP_LIMIT_S = 10.0
_TITLE = "memtriage-guard"
_JOB_CONTROL = {"SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}
_FATAL = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}


class Process:
    """Another process, distinguished from a later one with the same number by its start time."""

    __slots__ = ("_start_time", "pid")

    def __init__(self, pid: int, start_time: str | None = None) -> None:
        self.pid = pid
        self._start_time = start_time or self.start_time()

    def start_time(self) -> str:
        """Start in clock ticks since boot (proc(5): field 22 of `stat`); empty when it is dead."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as stream:
                # The second field is a name in parentheses, which may contain any character.
                fields = stream.read().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in "ZX" else fields[19]

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return self._start_time != "" and self.start_time() == self._start_time

    def catches(self, signum: int) -> bool:
        """Whether a handler for the signal is installed (proc(5): `SigCgt` of `status`)."""
        try:
            with open(f"/proc/{self.pid}/status", encoding="utf-8", errors="replace") as stream:
                masks = [line.split()[1] for line in stream if line.startswith("SigCgt:")]
        except OSError:
            return False
        return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


class ResendDeadline:
    """Decides from the bytes in the pipe when to send the signal again.

    Args:
        grace_s: seconds from the delivery of the signal to the acknowledgement.
        report_s: seconds from the acknowledgement to the end of the process.
    """

    __slots__ = ("_grace_s", "_last", "_report_s", "acknowledged", "at_s", "signum")

    def __init__(self, grace_s: float, report_s: float) -> None:
        self._grace_s = grace_s
        self._report_s = report_s
        self._last: int | None = None
        self.acknowledged = False
        self.signum: int | None = None
        self.at_s: float | None = None

    def receive(self, byte: int, now_s: float, caught: bool) -> None:
        """Take one byte from the pipe.

        Args:
            byte: number of a signal that was delivered, or a byte of the guard.
            now_s: the time.
            caught: whether the process has a handler for that signal now. Then the signal went to the
                program's own handler, because the guard's is removed when it is called.
        """
        if byte == ACKNOWLEDGED:
            self.acknowledged = self._last is not None
            self.signum, self.at_s = self._last, now_s + self._report_s if self.acknowledged else None
        elif byte in GUARDED and not self.acknowledged:
            self._last = byte
            if self.signum is None and not caught:
                self.signum = byte
                self.at_s = now_s + self._grace_s

    def take_overdue(self, now_s: float) -> int | None:
        """Return, once, the signal whose time is up; else None."""
        if self.at_s is None or now_s < self.at_s:
            return None
        signum, self.signum, self._last, self.at_s = self.signum, None, None, None
        return signum

    def wait_s(self, now_s: float) -> float:
        """Seconds that the watchdog may sleep."""
        return POLL_S if self.at_s is None else min(POLL_S, max(0.0, self.at_s - now_s))


def start(pipe: int, grace_s: float, report_s: float) -> int | None:
    """Start a watchdog for this process on the reading end `pipe`, a descriptor above 2.

    Forks if this process has one thread. Otherwise starts a new interpreter, because a forked child of a
    process with threads can hang on a lock that one of them held.

    Returns:
        Process id of the watchdog; None if it could not be started (no `/proc`, no interpreter, no fork).
    """
    watched = Process(os.getpid())
    if not watched.is_alive():
        return None
    try:
        alone = len(os.listdir("/proc/self/task")) == 1
        return (_fork if alone else _spawn)(pipe, watched, grace_s, report_s)
    except (OSError, ValueError):
        return None


def _fork(pipe: int, watched: Process, grace_s: float, report_s: float) -> int | None:
    answer, report = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            _detach(pipe, report, watched, grace_s, report_s)
        os.close(report)
        with open(answer, "rb", closefd=False) as stream:
            text = stream.read()  # to its end: by then the watchdog has released this pipe, too
        _reap(child)
    finally:
        os.close(answer)
    return int(text) if text else None


def _reap(child: int) -> None:
    try:
        os.waitpid(child, 0)
    except ChildProcessError:
        # SIGCHLD is ignored in this process: the kernel has reaped it.
        return


def _spawn(pipe: int, watched: Process, grace_s: float, report_s: float) -> int | None:
    import subprocess

    if not sys.executable:
        return None
    arguments = [str(value) for value in (pipe, watched.pid, watched.start_time(), grace_s, report_s)]
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(pipe,),
            timeout=_STARTUP_LIMIT_S,
            check=True,
        )
    except subprocess.SubprocessError:
        return None
    return int(answer.stdout)


def _detach(pipe: int, report: int, watched: Process, grace_s: float, report_s: float) -> None:
    """Become the watchdog in a grandchild, and write its process id to `report`. Never returns."""
    try:
        if os.fork() == 0:
            gc.disable()
            _ignore_signals()
            _let_go_of_files(pipe, report)
            _watch(pipe, watched, ResendDeadline(grace_s, report_s))
    finally:
        # This process must not run the watched program's exit handlers, flush its buffers or raise.
        os._exit(0)


def _ignore_signals() -> None:
    """Ignore signals: schedulers and terminals signal whole groups, and the watchdog must outlive them."""
    for signum in signal.valid_signals():
        if getattr(signum, "name", "") not in _JOB_CONTROL | _FATAL:
            signal.signal(signum, signal.SIG_IGN)


def _let_go_of_files(pipe: int, report: int) -> None:
    """Close all descriptors but the pipe, so that no reader of the program's output waits for the watchdog.

    The process id goes to `report` last: after that the watchdog holds nothing of the program.
    """
    answer = os.dup(report)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in (pipe, answer):
            try:
                os.close(descriptor)
            except OSError:
                continue  # the descriptor of the directory listing, closed by now
    with open("/proc/self/comm", "w", encoding="utf-8") as stream:
        stream.write(_TITLE)
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)


def _watch(pipe: int, watched: Process, deadline: ResendDeadline) -> None:
    """Read the pipe until it closes, the guard ends or the watched process is gone."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        ready = poll.poll(deadline.wait_s(time.monotonic()) * 1000)
        received = os.read(pipe, 4096) if ready else b""
        if (ready and not received) or RELEASED in received or not watched.is_alive():
            return
        for byte in received:
            deadline.receive(byte, time.monotonic(), byte in GUARDED and watched.catches(byte))
        signum = deadline.take_overdue(time.monotonic())
        # If a handler was installed meanwhile, the interpreter runs again.
        if signum is not None and (deadline.acknowledged or not watched.catches(signum)):
            os.kill(watched.pid, signum)
            while deadline.acknowledged and watched.is_alive():
                time.sleep(_AGAIN_S)
                os.kill(watched.pid, signum)


if __name__ == "__main__":
    _pipe, _pid, _start, _grace, _limit = sys.argv[1:]
    _detach(int(_pipe), 1, Process(int(_pid), _start), float(_grace), float(_limit))
