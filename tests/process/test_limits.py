"""Limits that the program has set for itself do not end it for the work of the watch."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable

import pytest

from memtriage.process.descriptors import Descriptor
from memtriage.process.limits import own_processor_time, surviving_writes


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
