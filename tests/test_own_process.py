"""What the watch owns in the program's process: descriptors, threads, messages, borrowed modes."""

from __future__ import annotations

import _tracemalloc
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memtriage.observe.modes import Tracing
from memtriage.process.descriptors import Descriptor
from memtriage.process.limits import own_processor_time, surviving_writes
from memtriage.process.messages import Messages, printable
from memtriage.process.threads import OwnThread
from memtriage.session.signals.own_modules import OwnModules


def test_a_descriptor_that_became_another_file_is_left_alone(tmp_path: Path) -> None:
    own = Descriptor(os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT))
    assert own.number > 255 and own.write(b"1") == 1
    os.close(own.number)
    with (tmp_path / "theirs").open("wb") as theirs:
        os.dup2(theirs.fileno(), own.number)
        assert not own.ours
        with pytest.raises(OSError, match="closed memtriage's descriptor"):
            own.write(b"2")
        own.close()
        os.write(own.number, b"3")  # still theirs
        os.close(own.number)
    assert (tmp_path / "own").read_bytes() == b"1" and (tmp_path / "theirs").read_bytes() == b"3"


def test_a_thread_that_the_program_does_not_see() -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        threading.current_thread()  # as a library may do
        inside.set()
        leave.wait()

    before = threading.enumerate()
    thread = OwnThread(work)
    thread.start()
    assert inside.wait(60) and thread.is_alive and not thread.is_current and not thread.join(0)
    leave.set()
    assert thread.join(60) and not thread.is_alive
    assert threading.enumerate() == before


def test_a_thread_that_takes_no_signal_of_the_program() -> None:
    blocked: list[set[int]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    thread = OwnThread(lambda: blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, []))))
    thread.start()
    assert thread.join(60)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert {signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM} <= blocked[0]
    assert signal.SIGSEGV not in blocked[0]


def test_messages_never_raise_and_escape_what_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    Messages().say("a\033[2Jb")
    assert capsys.readouterr().err == "memtriage: a\\x1b[2Jb\n"
    assert printable("gr\u00fcn\n") == "gr\u00fcn\\n"
    with open(os.devnull, "w") as closed:
        messages = Messages(closed)
    messages.say("lost")
    assert not messages.isatty()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.default_int_handler])
def test_a_failing_write_sends_the_program_no_signal(handler: Callable[..., object]) -> None:
    reading, writing = map(Descriptor, os.pipe())
    reading.close()
    found = signal.signal(signal.SIGPIPE, handler)
    try:
        with pytest.raises(BrokenPipeError), surviving_writes():
            os.write(writing.number, b"lost")
        with pytest.raises(BrokenPipeError):
            writing.write(b"lost")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        signal.raise_signal(signal.SIGPIPE)  # the program's own stays
        with pytest.raises(BrokenPipeError):
            writing.write(b"lost")
        assert signal.sigpending() == {signal.SIGPIPE} == {signal.sigwait([signal.SIGPIPE])}
        assert signal.SIGPIPE not in mask
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        signal.signal(signal.SIGPIPE, found)
        writing.close()


def test_processor_time_that_is_not_the_programs() -> None:
    child = os.fork()
    if child == 0:
        limit = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        with own_processor_time():
            while time.process_time() < limit + 0.1:
                pass
        left = resource.getrlimit(resource.RLIMIT_CPU)
        os._exit(7 if limit < left[0] <= limit + 2 and left[1] == resource.RLIM_INFINITY else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    made = Tracing()
    made.install()
    yield made
    made.remove()
    assert not _tracemalloc.is_tracing() and tracemalloc.start is _tracemalloc.start


def test_borrowed_tracing_is_not_seen(tracing: Tracing) -> None:
    assert tracing.start(5) and _tracemalloc.is_tracing()
    assert not tracemalloc.is_tracing() and tracemalloc.get_traced_memory() == (0, 0)
    with pytest.raises(RuntimeError):
        tracemalloc.take_snapshot()
    tracemalloc.stop()
    assert tracing.borrowed
    with tracing.reading():
        assert tracemalloc.is_tracing()


def test_tracing_that_the_program_starts_is_its_own(tracing: Tracing) -> None:
    tracing.start(5)
    tracemalloc.start(2)
    assert not tracing.borrowed and tracemalloc.get_traceback_limit() == 2
    tracing.stop()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


def test_each_has_its_own_module_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorsys.py").write_text("WHOSE = 'program'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    modules = OwnModules(str(tmp_path))
    modules.begin_program()
    import colorsys

    assert colorsys.WHOSE == "program"  # type: ignore[attr-defined]
    modules.begin_work()
    assert "colorsys" not in sys.modules and str(tmp_path) not in sys.path
    import colorsys as library

    assert hasattr(library, "rgb_to_hls")
    modules.end_work()
    assert sys.modules["colorsys"] is colorsys and sys.path[0] == str(tmp_path)
    modules.begin_work()
    assert sys.modules["colorsys"] is library
    modules.end_work()
    del sys.modules["colorsys"]
