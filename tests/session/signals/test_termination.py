"""Termination signals: the report is written, and the process dies as it would have without a guard."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from memtriage.session.signals.watchdog import Process
from support.signals import AS_FROM_A_TERMINAL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard's watchdog needs /proc")

PRELUDE = """
import ctypes, itertools, os, signal, sys, threading
from collections import deque
from memtriage.session.signals.termination import TerminationGuard

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def report(signum):
    say("report", signum)

def rest():
    "Until a signal comes."
    while True:
        signal.pause()

def hang_with_the_gil():
    "No bytecode runs after the line is written."
    deque(itertools.chain(map(os.write, [1], [b"ready\\n"]), itertools.repeat(None)), maxlen=0)

def hang_without_the_gil():
    "A mutex locked twice: the wait is taken up again after each signal."
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    deque(itertools.chain(map(os.write, [1], [b"ready\\n"]), map(lock, [mutex])), maxlen=0)
"""


class Watched:
    """A running program: reads its lines, sends it signals."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> tuple[int, list[str], str]:
        """Exit status, the lines not read yet, and the error output."""
        out, error = self.process.communicate(timeout=60)
        return self.process.returncode, out.splitlines(), error


@contextlib.contextmanager
def running(program: str, prelude: str = PRELUDE) -> Iterator[Watched]:
    process = subprocess.Popen(
        [*AS_FROM_A_TERMINAL, sys.executable, "-c", prelude + textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Watched(process)
        finally:
            process.kill()


def end_of(program: str) -> tuple[int, list[str], str]:
    """Exit status, lines and error output of a program that is left alone."""
    with running(program) as watched:
        return watched.end()


def wait_until_gone(pid: int) -> None:
    """Returns when the process, no child of ours, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 60)[0], f"{pid} did not end"
    finally:
        os.close(descriptor)


def wait_until_idle(pid: int, wakes: int = 2) -> None:
    """Returns once the watchdog has read its pipe and sleeps again: its voluntary switches have grown.

    It also wakes once a `POLL_S` to look around, so that four wakes are more than a second.
    """

    def switches() -> int:
        with open(f"/proc/{pid}/status", encoding="utf-8") as stream:
            return next(int(line.split()[1]) for line in stream if line.startswith("voluntary_ctxt"))

    before = switches()
    while switches() < before + wakes:
        os.sched_yield()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_reports_then_dies_of_the_signal(signum: int) -> None:
    with running("""
        with TerminationGuard(report):
            say("ready")
            rest()
    """) as watched:
        assert watched.line() == "ready"
        watched.send(signum)
        assert watched.end() == (-signum, [f"report {signum:d}"], "")


def test_report_that_fails_changes_nothing_about_the_end() -> None:
    with running("""
        def report(signum):
            raise ValueError("disk full")
        with TerminationGuard(report):
            say("ready")
            rest()
    """) as watched:
        assert watched.line() == "ready"
        watched.send(signal.SIGTERM)
        status, lines, error = watched.end()
        assert (status, lines) == (-signal.SIGTERM, [])
        assert error.endswith("ValueError: disk full\n")


@pytest.mark.parametrize("hang", ["hang_with_the_gil", "hang_without_the_gil"])
@pytest.mark.parametrize("threads", [0, 1], ids=["forked watchdog", "spawned watchdog"])
def test_native_hang_dies_all_the_same(hang: str, threads: int) -> None:
    with running(f"""
        for _ in range({threads}):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        with TerminationGuard(report, grace_s=0.05) as guard:
            say("watchdog" if guard.watchdog_pid else "none")
            {hang}()
    """) as watched:
        assert [watched.line(), watched.line()] == ["watchdog", "ready"]
        watched.send(signal.SIGTERM)
        assert watched.end() == (-signal.SIGTERM, [], "")


def test_report_may_take_longer_than_the_handler_to_start() -> None:
    with running("""
        def report(signum):
            say("report")
            sys.stdin.readline()
            say("written")
        with TerminationGuard(report, grace_s=0.8) as guard:
            say(guard.watchdog_pid)
            rest()
    """) as watched:
        pid = int(watched.line())
        watched.send(signal.SIGTERM)
        assert watched.line() == "report"
        wait_until_idle(pid, wakes=4)
        assert watched.process.stdin is not None
        print(file=watched.process.stdin, flush=True)
        assert watched.end() == (-signal.SIGTERM, ["written"], "")


@pytest.mark.parametrize("hang", ["hang_with_the_gil", "rest"])
def test_report_that_hangs_is_ended(hang: str) -> None:
    with running(f"""
        with TerminationGuard(lambda signum: {hang}(), report_s=0.05):
            os.kill(os.getpid(), signal.SIGTERM)
    """) as watched:
        assert watched.end()[0] == -signal.SIGTERM


def test_signals_during_the_report_change_nothing() -> None:
    """As of a scheduler that signals all processes of a job, and a launcher that passes it on."""
    assert end_of("""
        def report(signum):
            say("report", signum)
            for later in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), later)
            say("written")
        with TerminationGuard(report):
            os.kill(os.getpid(), signal.SIGTERM)
    """) == (-signal.SIGTERM, ["report 15", "written"], "")


def test_signals_during_the_report_go_to_the_earlier_handler() -> None:
    assert end_of("""
        signal.signal(signal.SIGTERM, lambda signum, frame: say("earlier"))
        def report(signum):
            os.kill(os.getpid(), signum)
            say("written")
        with TerminationGuard(report):
            os.kill(os.getpid(), signal.SIGTERM)
    """) == (0, ["written", "earlier", "earlier"], "")


@pytest.mark.parametrize("last", [False, True])
def test_the_report_waits_for_the_watchs_work(last: bool) -> None:
    assert end_of(f"""
        from memtriage.session.signals.own_work import do_own_work
        def work():
            os.kill(os.getpid(), signal.SIGTERM)
            say("work is done")
        with TerminationGuard(report):
            do_own_work(work, last={last})
    """) == (-signal.SIGTERM, ["work is done", "report 15"], "")


def test_an_interrupt_waits_for_the_watchs_work() -> None:
    assert end_of("""
        from memtriage.session.signals.own_work import do_own_work
        def work():
            os.kill(os.getpid(), signal.SIGINT)
            say("work is done")
        with TerminationGuard(report):
            say(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            try:
                do_own_work(work)
            except KeyboardInterrupt:
                say("interrupted")
        say(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """) == (0, ["True", "work is done", "interrupted", "True"], "")


def test_programs_own_handler_replaces_the_guards() -> None:
    with running("""
        with TerminationGuard(report, grace_s=0) as guard:
            say(signal.getsignal(signal.SIGTERM))
            say(signal.signal(signal.SIGTERM, lambda *_: say("own")))
            say(guard.watchdog_pid)
            while sys.stdin.readline():
                pass
        say(callable(signal.getsignal(signal.SIGTERM)))
    """) as watched:
        assert [watched.line() for _ in range(2)] == [f"{signal.SIG_DFL}", f"{signal.SIG_DFL}"]
        pid = int(watched.line())
        for _ in range(2):
            watched.send(signal.SIGTERM)
            assert watched.line() == "own"
            wait_until_idle(pid)
        assert watched.end() == (0, ["True"], "")


def test_handler_that_goes_back_to_the_default_is_not_cut_short() -> None:
    """The usual first line of a handler that saves a checkpoint; the watchdog has no business then."""
    with running("""
        def save(signum, frame):
            signal.signal(signum, signal.SIG_DFL)
            say("saving")
            sys.stdin.readline()
            say("saved")
            os._exit(5)
        with TerminationGuard(report, grace_s=0) as guard:
            signal.signal(signal.SIGTERM, save)
            say(guard.watchdog_pid)
            rest()
    """) as watched:
        pid = int(watched.line())
        watched.send(signal.SIGTERM)
        assert watched.line() == "saving"
        wait_until_idle(pid)
        assert watched.process.stdin is not None
        print(file=watched.process.stdin, flush=True)
        assert watched.end() == (5, ["saved"], "")


def test_chained_previous_handler_is_the_unwatched_one() -> None:
    with running("""
        with TerminationGuard(report):
            previous = signal.getsignal(signal.SIGTERM)
            def stop(signum, frame):
                if callable(previous):
                    previous(signum, frame)
                say("graceful")
            signal.signal(signal.SIGTERM, stop)
            os.kill(os.getpid(), signal.SIGTERM)
            say("go on")
    """) as watched:
        assert watched.end() == (0, ["graceful", "go on"], "")


def test_default_set_again_by_the_program_brings_the_guard_back() -> None:
    with running("""
        with TerminationGuard(report, grace_s=0.05):
            previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGTERM)
            say(signal.signal(signal.SIGTERM, previous), signal.getsignal(signal.SIGTERM))
            hang_with_the_gil()
    """) as watched:
        assert watched.line() == f"{signal.SIG_IGN} {signal.SIG_DFL}"
        assert watched.line() == "ready"
        watched.send(signal.SIGTERM)
        assert watched.end() == (-signal.SIGTERM, [], "")


def test_earlier_handler_is_called_after_the_report() -> None:
    lines = ["True", "report 15", "earlier 15 True", "earlier 15 True", "True"]
    assert end_of("""
        def earlier(signum, frame):
            say("earlier", signum, frame is not None)
        signal.signal(signal.SIGTERM, earlier)
        with TerminationGuard(report):
            say(signal.getsignal(signal.SIGTERM) is earlier)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        say(signal.getsignal(signal.SIGTERM) is earlier)
    """) == (0, lines, "")


def test_ignored_signals_stay_ignored() -> None:
    assert end_of("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with TerminationGuard(report) as guard:
            say(guard.active, guard.watchdog_pid)
            os.kill(os.getpid(), signal.SIGTERM)
        say("alive")
    """) == (0, ["False None", "alive"], "")


def test_everything_is_put_back() -> None:
    default = str(signal.SIG_DFL)
    lines = ["True True", "False True", f"{default} {default} -1", "True"]
    assert end_of("""
        functions = signal.signal, signal.getsignal, signal.set_wakeup_fd
        files = os.listdir("/proc/self/fd")
        with TerminationGuard(report) as guard:
            say(guard.active, signal.signal is not functions[0])
        say(guard.active, functions == (signal.signal, signal.getsignal, signal.set_wakeup_fd))
        say(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), signal.set_wakeup_fd(-1))
        say(files == os.listdir("/proc/self/fd"))
    """) == (0, lines, "")


def test_interrupt_is_not_touched() -> None:
    ends = []
    for guard in ("contextlib.nullcontext()", "TerminationGuard(report)"):
        with running(f"""
            import contextlib
            with {guard}:
                say("ready")
                rest()
        """) as watched:
            assert watched.line() == "ready"
            watched.send(signal.SIGINT)
            status, lines, error = watched.end()
            ends.append((status, lines, error.splitlines()[-1]))
    assert ends[0] == ends[1] == (-signal.SIGINT, [], "KeyboardInterrupt")


FORKED = """
    with TerminationGuard(report) as guard:
        child = os.fork()
        if child == 0:
            say(signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1), guard.active)
            rest()
        sys.stdin.readline()
        os.kill(child, signal.SIGTERM)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        say(signal.getsignal(signal.SIGTERM), guard.active)
        rest()
"""


def test_forked_child_dies_and_parent_stays_guarded() -> None:
    with running(FORKED) as watched:
        assert watched.line() == f"{signal.SIG_DFL} -1 False"
        assert watched.process.stdin is not None
        print(file=watched.process.stdin, flush=True)
        assert watched.line() == "-15"
        assert watched.line() == f"{signal.SIG_DFL} True"
        watched.send(signal.SIGTERM)
        assert watched.end() == (-signal.SIGTERM, ["report 15"], "")


def test_forked_child_has_the_earlier_handler() -> None:
    assert end_of("""
        signal.signal(signal.SIGTERM, lambda *_: say("earlier"))
        with TerminationGuard(report):
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            os.waitpid(child, 0)
    """) == (0, ["earlier"], "")


def test_watchdog_is_no_child_and_holds_nothing() -> None:
    with running("""
        import fcntl, tempfile
        lock = tempfile.TemporaryFile()
        with TerminationGuard(report) as guard:
            try:
                os.wait()
            except ChildProcessError:
                say("no child")
            say(guard.watchdog_pid)
            sys.stdin.readline()
    """) as watched:
        assert watched.line() == "no child"
        pid = int(watched.line())
        with open(f"/proc/{pid}/comm", encoding="utf-8") as stream:
            assert stream.read() == "memtriage-guard\n"
        files = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
        assert sorted(name.partition(":")[0] for name in files) == [os.devnull, "pipe"]
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGUSR1)
        watched.send(signal.SIGTERM)
        assert watched.end() == (-signal.SIGTERM, ["report 15"], "")
        wait_until_gone(pid)


@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_watchdog_ends_with_the_process(end: str) -> None:
    with running(f"""
        with TerminationGuard(report) as guard:
            say(guard.watchdog_pid)
            sys.stdin.readline()
            {end}
    """) as watched:
        pid = int(watched.line())
        assert Process(pid).is_alive()
        watched.end()
        wait_until_gone(pid)


def test_watchdog_ends_although_a_natively_forked_child_lives_on() -> None:
    """No hook runs in that child: it keeps the pipe open, and the watchdog has to look for itself."""
    with running("""
        with TerminationGuard(report) as guard:
            say(guard.watchdog_pid)
            libc = ctypes.PyDLL(None)
            child = libc.fork()
            if child == 0:
                libc.pause()
            say(child)
            os._exit(0)
    """) as watched:
        pid, child = int(watched.line()), int(watched.line())
        try:
            wait_until_gone(pid)
            assert Process(child).is_alive()
        finally:
            os.kill(child, signal.SIGKILL)
        assert watched.end()[0] == 0


def test_event_loop_with_its_own_wakeup_descriptor() -> None:
    """The watchdog is deaf as long as that is set: the default action rules, and comes back as a report."""
    with running("""
        import asyncio
        async def main():
            loop = asyncio.get_running_loop()
            arrived = asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR1, arrived.set)
            os.kill(os.getpid(), signal.SIGUSR1)
            await arrived.wait()
            with open("/proc/self/status") as status:
                caught = [int(line.split()[1], 16) for line in status if line.startswith("SigCgt")]
            say(bool(caught[0] >> signal.SIGTERM - 1 & 1))
            loop.remove_signal_handler(signal.SIGUSR1)
        with TerminationGuard(report, grace_s=0.05):
            asyncio.run(main())
            hang_with_the_gil()
    """) as watched:
        assert [watched.line(), watched.line()] == ["False", "ready"]
        watched.send(signal.SIGTERM)
        assert watched.end() == (-signal.SIGTERM, [], "")


def test_no_handler_without_a_watchdog() -> None:
    nothing = f"False None {signal.SIG_DFL}"
    assert end_of("""
        import socket
        from memtriage.session.signals import watchdog
        def attempt():
            with TerminationGuard(report) as guard:
                say(guard.active, guard.watchdog_pid, signal.getsignal(signal.SIGTERM))
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        signal.set_wakeup_fd(ours.fileno())
        attempt()
        say(signal.set_wakeup_fd(-1) == ours.fileno())
        watchdog.start = lambda *_: None
        attempt()
    """) == (0, [nothing, nothing, "True", nothing], "")


def test_nested_guard_leaves_it_to_the_outer_one() -> None:
    assert end_of("""
        with TerminationGuard(report):
            with TerminationGuard(lambda signum: say("inner")) as inner:
                say(inner.active)
            os.kill(os.getpid(), signal.SIGTERM)
    """) == (-signal.SIGTERM, ["False", "report 15"], "")
