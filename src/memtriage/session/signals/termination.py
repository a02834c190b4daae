"""Write the report before a termination signal ends the process, which then dies as it would have."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from memtriage.observe.foreign import programs_own
from memtriage.process.descriptors import Descriptor
from memtriage.process.forks import call_in_forked_children
from memtriage.process.replaced import Replaced
from memtriage.process.stdlib import os, threading, time
from memtriage.session.signals import watchdog
from memtriage.session.signals.own_work import HeldHandler, do_own_work, held

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# asm-generic/signal.h. As a C int: the flag is bit 31.
_SA_RESETHAND = -0x80000000
_SA_RESTART = 0x10000000
# Machines on which glibc and musl lay out `struct sigaction` as _KernelAction has it; s390x and mips differ.
_KNOWN_LAYOUT = {"x86_64", "aarch64", "ppc64le", "riscv64"}
_NO_FD = -1


class TerminationGuard:
    """Calls `on_terminate` when SIGTERM or SIGHUP arrives, then lets the signal do what it would have done.

    A context manager for the main thread. What it does depends on the disposition that it finds:

    - default action: the process reports, then dies of the same signal. If native code hangs, even while it
      holds the GIL, a second signal kills. A watchdog process sends it after `grace_s` seconds, and the
      process dies without a report. Without a watchdog (not Linux, PID 1, no `/proc`, another wakeup
      descriptor) no handler is installed: the process must be able to die.
    - a Python handler: it is called after the report. Later signals go to it alone.
    - ignored, or a handler that is not Python's: not changed.

    The watch's own work, such as a census or the report at the program's end, is finished first. Signals that
    arrive during the report change nothing: launchers and schedulers send several.

    The program does not see the guard: `signal.getsignal` and `signal.signal` return the disposition that was
    found, so a handler that calls "the previous one" behaves as it does unwatched. A handler that the program
    installs replaces the guard's; setting the default action again restores the guard's. While an event loop
    has its own `signal.set_wakeup_fd`, the watchdog is not notified, and the default action is in force.

    Python handlers of other signals, such as the one that raises `KeyboardInterrupt`, wait for the watch's
    own work. Forked children have the dispositions that were found.

    Not seen: handlers that native code installs (they replace the guard's), and calls through a name that was
    bound before (`from signal import signal` in a module imported earlier).

    Args:
        on_terminate: called with the signal's number, in the main thread between two bytecodes: the program
            may hold a lock or be in the middle of a write to stdout. What it raises is printed.
        grace_s: seconds that the Python handler may take to start.
        report_s: seconds that the watch's own work and `on_terminate` may take.
    """

    def __init__(
        self, on_terminate: Callable[[int], None], grace_s: float = 2.0, report_s: float = 30.0
    ) -> None:
        self._on_terminate = on_terminate
        self._grace_s = grace_s
        self._report_s = report_s
        self._functions = _SignalFunctions()
        self._handler: Handler = _GuardHandler(self)  # one object, to be recognized
        self._before: dict[int, Handler] = {}
        self._wake: _WakePipe | None = None
        self._give_up_s: float | None = None
        self._reported = False

    @property
    def active(self) -> bool:
        """Whether any signal is guarded."""
        return bool(self._before)

    @property
    def watchdog_pid(self) -> int | None:
        """Process id of the watchdog, so that ledgers leave it out; None without one."""
        return self._wake.watchdog_pid if self._wake else None

    def __enter__(self) -> Self:
        if threading.get_ident() != threading.main_thread().ident:
            return self
        before: dict[int, Handler] = {signum: signal.getsignal(signum) for signum in watchdog.GUARDED}
        guarded = [signum for signum, handler in before.items() if callable(handler)]
        deadly = [signum for signum, handler in before.items() if _kills(signum, handler)]
        if deadly:
            self._wake = _WakePipe.open(self._grace_s, self._report_s)
        if self._wake:
            guarded += deadly
        self._before = {signum: before[signum] for signum in guarded}
        call_in_forked_children(self._leave)
        self._functions.hold()
        self._hide()
        for signum in self._before:
            self._install(signum)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._wake:
            self._wake.tell(watchdog.RELEASED)
        self._leave()

    def _leave(self) -> None:
        """Restore the dispositions that are still the guard's: at its end, and in each forked child."""
        self._functions.restore()
        self._functions.release_held()
        for signum, handler in self._before.items():
            if self._functions.getsignal(signum) is self._handler:
                self._functions.signal(signum, handler)
        self._before = {}
        if self._wake:
            self._wake.close(self._functions)
            self._wake = None

    def _install(self, signum: int) -> None:
        """Install the guard's handler, or the default action while there is no watchdog."""
        handler = self._before[signum]
        if callable(handler):
            self._functions.signal(signum, self._handler)
        elif self._wake is None or not self._wake.is_ours:
            self._functions.signal(signum, handler)
        else:
            self._functions.signal(signum, self._handler)
            if not _reset_after_first(signum):
                self._functions.signal(signum, handler)

    def arrived(self, signum: int) -> None:
        """Acknowledge a signal, and let the next ones wait, too, until the report takes too long."""
        if self._wake is None or callable(self._before.get(signum, held)):
            return  # the kernel has not removed the guard's handler
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + self._report_s
            self._wake.tell(watchdog.ACKNOWLEDGED)
        if time.monotonic() < self._give_up_s:
            self._install(signum)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Report, and let the signal do what it would have done."""
        installed = programs_own(self._functions.getsignal(signum))  # the program's, of a later signal
        handler = self._before.get(signum, installed)

        def end() -> None:
            if signum in self._before and not self._reported:
                self._reported = True
                self._report(signum)
            self._before.pop(signum, None)
            self._functions.signal(signum, held(handler))
            if not callable(handler):
                os.kill(os.getpid(), signum)

        do_own_work(end)
        if callable(handler):
            handler(signum, frame)

    def _report(self, signum: int) -> None:
        try:
            self._on_terminate(signum)
        except Exception:
            # Even if the report failed, the process must die, or its own handler must run.
            with suppress(Exception):
                traceback.print_exc()

    def _hide(self) -> None:
        """Wrap the functions of `signal`, so that the program sees what it would see without a guard."""
        original = self._functions

        @functools.wraps(original.signal)
        def set_handler(signalnum: int, handler: Handler) -> Handler:
            if signalnum not in self._before:
                replaced: Handler = programs_own(original.signal(signalnum, held(handler)))
                return replaced
            previous = get_handler(signalnum)
            if self._stands_for(signalnum, handler):
                self._install(signalnum)
            else:
                original.signal(signalnum, held(handler))
            return previous

        @functools.wraps(original.getsignal)
        def get_handler(signalnum: int) -> Handler:
            handler = original.getsignal(signalnum)
            own: Handler = programs_own(handler)
            return self._before.get(signalnum, own) if handler is self._handler else own

        @functools.wraps(original.set_wakeup_fd)
        def set_wakeup_fd(fd: int, *, warn_on_full_buffer: bool = True) -> int:
            if self._wake is None:
                return original.set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
            previous = self._wake.share(original, fd, warn_on_full_buffer)
            self._reinstall()
            return previous

        original.put(signal=set_handler, getsignal=get_handler, set_wakeup_fd=set_wakeup_fd)

    def _stands_for(self, signum: int, handler: Handler) -> bool:
        """Whether setting this handler means returning to what the guard found."""
        before = self._before[signum]
        return handler is before or (issubclass(type(handler), int) and handler == before)

    def _reinstall(self) -> None:
        """Install again, after another wakeup descriptor was set or removed."""
        for signum in self._before:
            handler = self._functions.getsignal(signum)
            if handler is self._handler or handler is signal.SIG_DFL:
                self._install(signum)


class _GuardHandler(HeldHandler):
    """The guard's handler. Like the program's it waits for the watch's work, but it always runs."""

    __slots__ = ("_guard",)
    after_program = True

    def __init__(self, guard: TerminationGuard) -> None:
        super().__init__(guard.handle)
        self._guard = guard

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._guard.arrived(signum)
        super().__call__(signum, frame)

    def run(self, signum: int, frame: FrameType | None) -> None:
        self.handler(signum, frame)


class _SignalFunctions(Replaced):
    """The functions of `signal` as they were, and the guard's replacements."""

    def __init__(self) -> None:
        super().__init__(signal)
        self.signal = signal.signal
        self.getsignal = signal.getsignal
        self.set_wakeup_fd = signal.set_wakeup_fd

    def hold(self) -> None:
        """Have the handlers that are installed already wait for the watch's work."""
        self._install(lambda handler: held(handler) if callable(handler) else handler)

    def release_held(self) -> None:
        """Install the program's handlers themselves instead of the wrappers that held them back."""
        self._install(lambda handler: handler.handler if type(handler) is HeldHandler else handler)

    def _install(self, instead: Callable[[Handler], Handler]) -> None:
        for signum in signal.valid_signals():
            before = self.getsignal(signum)
            handler = instead(before)
            if handler is not before:
                action = _read_action(signum)
                self.signal(signum, handler)
                if action is not None and action.flags & _SA_RESTART:
                    signal.siginterrupt(signum, False)  # installing a handler has reset it


class _WakePipe:
    """The pipe into which the interpreter writes the number of each signal, and its watchdog.

    This process keeps the reading end open, too, so that there is no SIGPIPE if the watchdog is killed.
    """

    def __init__(self, reading: Descriptor, writing: Descriptor, watchdog_pid: int) -> None:
        self._reading = reading
        self._writing = writing
        self.watchdog_pid = watchdog_pid
        self.is_ours = True

    @classmethod
    def open(cls, grace_s: float, report_s: float) -> _WakePipe | None:
        """Open the pipe; None if no watchdog can be started, or another wakeup descriptor is set."""
        reading, writing = map(Descriptor, os.pipe())
        os.set_blocking(writing.number, False)
        # Below 3, the program's own output would go into the pipe.
        usable = min(reading.number, writing.number) > 2
        pid = watchdog.start(reading.number, grace_s, report_s) if usable else None
        previous = _NO_FD
        if pid is not None:
            previous = signal.set_wakeup_fd(writing.number, warn_on_full_buffer=False)
        if previous != _NO_FD:
            signal.set_wakeup_fd(previous)
        if pid is None or previous != _NO_FD:
            writing.close()
            reading.close()
            return None
        return cls(reading, writing, pid)

    def tell(self, byte: int) -> None:
        # If the pipe is full or the watchdog is dead, nobody reads, and nothing depends on it.
        with suppress(OSError):
            self._writing.write(bytes([byte]))

    def share(self, functions: _SignalFunctions, fd: int, warn_on_full_buffer: bool) -> int:
        """`signal.set_wakeup_fd` as the program sees it: only its own descriptor is ever set."""
        own = self._writing.number
        if fd == _NO_FD and self._writing.ours:
            previous = functions.set_wakeup_fd(own, warn_on_full_buffer=False)
        else:
            previous = functions.set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
        self.is_ours = fd == _NO_FD and self._writing.ours
        return _NO_FD if previous == own else previous

    def close(self, functions: _SignalFunctions) -> None:
        previous = functions.set_wakeup_fd(_NO_FD)
        if previous not in (_NO_FD, self._writing.number):
            functions.set_wakeup_fd(previous)
        self._writing.close()
        self._reading.close()


class _KernelAction(ctypes.Structure):
    """`struct sigaction` of glibc and musl on the machines of `_KNOWN_LAYOUT`."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


def _kills(signum: int, handler: Handler) -> bool:
    """Whether the signal's default action ends this process, and can be restored at the first delivery."""
    if handler is not signal.SIG_DFL:
        return False
    # The kernel does not apply the default action to process 1 of a container (see signal(7) for init).
    action = _read_action(signum)
    return os.getpid() != 1 and action is not None and action.handler is None


def _read_action(signum: int) -> _KernelAction | None:
    """Return the signal's action; None where its layout is unknown."""
    if sys.platform != "linux" or os.uname().machine not in _KNOWN_LAYOUT:
        return None
    action = _KernelAction()
    failed = ctypes.CDLL(None).sigaction(signum, None, ctypes.byref(action))
    return None if failed else action


def _reset_after_first(signum: int) -> bool:
    """Make the kernel restore the default action when it delivers the signal; False if it does not."""
    action = _read_action(signum)
    if action is None:
        return False
    action.flags |= _SA_RESETHAND
    failed: int = ctypes.CDLL(None).sigaction(signum, ctypes.byref(action), None)
    return not failed
