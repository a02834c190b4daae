"""Limits that the program has set for itself do not end it for the work of the watch."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable

import pytest

from memtriage.process.descriptors import Descriptor
from memtriage.process.limits import lifted_memory_limit, own_processor_time, surviving_writes


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


def test_a_program_that_ignores_neither_signal_gets_none() -> None:
    reading, writing = map(Descriptor, os.pipe())
    reading.close()
    before = {name: signal.signal(name, signal.SIG_DFL) for name in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        with pytest.raises(BrokenPipeError), surviving_writes():
            assert signal.SIGXFSZ in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            os.write(writing.number, b"lost")
        assert not {signal.SIGPIPE, signal.SIGXFSZ} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        writing.close()


def test_signals_that_are_ignored_are_left_alone() -> None:
    before = {name: signal.signal(name, signal.SIG_IGN) for name in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        with surviving_writes():
            assert not {signal.SIGPIPE, signal.SIGXFSZ} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def test_the_limit_of_the_address_space_is_lifted_and_put_back() -> None:
    child = os.fork()
    if child == 0:
        limits = (1 << 45, 1 << 46)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        with lifted_memory_limit():
            lifted = resource.getrlimit(resource.RLIMIT_AS)
        put_back = resource.getrlimit(resource.RLIMIT_AS)
        os._exit(7 if (lifted, put_back) == ((1 << 46, 1 << 46), limits) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
