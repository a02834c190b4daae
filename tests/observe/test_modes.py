"""Tracing of allocations that the watch borrows, and that the program does not see."""

from __future__ import annotations

import _tracemalloc
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from memtriage.observe.modes import AnomalyMode, Tracing


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
    assert tracing.borrowed and tracemalloc.get_traceback_limit() == 1
    with tracing.reading():
        assert tracemalloc.is_tracing()


def test_tracing_that_the_program_starts_is_its_own(tracing: Tracing) -> None:
    tracing.start(5)
    tracemalloc.start(2)
    assert not tracing.borrowed and tracemalloc.get_traceback_limit() == 2
    tracing.stop()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


def test_a_trace_that_is_borrowed_has_as_many_frames_as_asked(tracing: Tracing) -> None:
    tracing.start(7)
    assert _tracemalloc.get_traceback_limit() == 7
    tracemalloc.start()
    assert tracemalloc.get_traceback_limit() == 1
    tracemalloc.stop()


def test_each_function_answers_as_while_tracing_is_off(tracing: Tracing) -> None:
    tracing.start(3)
    kept = [bytes(1000) for _ in range(10)]
    tracemalloc.clear_traces()
    tracemalloc.reset_peak()
    assert tracemalloc.get_object_traceback(kept) is None
    with tracing.reading():
        assert tracemalloc.get_traced_memory()[0] > 0
    assert tracemalloc.get_traced_memory() == (0, 0)


def test_what_the_program_has_on_is_not_borrowed(tracing: Tracing) -> None:
    tracemalloc.start(2)
    assert not tracing.start(5) and not tracing.borrowed
    assert tracemalloc.get_traceback_limit() == 2 and tracemalloc.is_tracing()
    tracing.stop()
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


@pytest.fixture
def anomaly() -> Iterator[AnomalyMode]:
    made = AnomalyMode()
    yield made
    made.stop()
    assert not torch.is_anomaly_enabled()


def is_on() -> bool:
    """As autograd has it, whatever the functions of torch say."""
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert node is not None
    return "traceback_" in node.metadata


def test_borrowed_anomaly_mode_is_not_seen(anomaly: AnomalyMode) -> None:
    assert not anomaly.borrowed and not is_on()
    assert anomaly.start() and anomaly.borrowed and is_on()
    assert not torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    assert anomaly.start()
    anomaly.stop()
    anomaly.stop()
    assert not is_on() and not anomaly.borrowed


def test_anomaly_mode_is_off_inside_a_backward(anomaly: AnomalyMode) -> None:
    anomaly.start()
    anomaly.in_backward(True)
    assert not is_on() and anomaly.borrowed
    anomaly.in_backward(False)
    assert is_on()


def test_anomaly_mode_that_the_program_switches_on_is_its_own(anomaly: AnomalyMode) -> None:
    anomaly.start()
    torch.set_anomaly_enabled(True, False)
    assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled() and not anomaly.borrowed
    anomaly.in_backward(True)
    assert is_on()
    torch.set_anomaly_enabled(False)
    assert not torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and anomaly.borrowed


def test_anomaly_mode_that_is_on_already_is_not_borrowed(anomaly: AnomalyMode) -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert not anomaly.start() and not anomaly.borrowed


def test_stacks_begin_at_the_outermost_call(anomaly: AnomalyMode) -> None:
    anomaly.start()
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert node is not None
    stack = node.metadata["traceback_"]
    own = f'  File "{__file__}", line '
    assert stack[-1].startswith(own) and stack[-1].endswith("in test_stacks_begin_at_the_outermost_call\n")
    assert len(stack) > 5 and not stack[0].startswith(own)
