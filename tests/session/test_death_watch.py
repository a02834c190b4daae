"""What is noted of batches while a program runs, and when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from memtriage.model.blocks import DeviceCounters
from memtriage.model.census import Census
from memtriage.model.position import TrainingPosition
from memtriage.observe import cuda
from memtriage.session import death_watch
from memtriage.session.death_watch import BatchPolicy, DeathWatch
from support.censuses import census


class Watched:
    """A program whose batches have these elements at each backward; the clock is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.took = 100.0, 0.0
        self.batch: int | BaseException | None = None
        self.failures: list[str] = []
        self.looked: list[int] = []
        self.observers: list[Callable[..., None] | None] = []
        self.running, self.initialized = True, False
        self.watch = DeathWatch(
            position=lambda: TrainingPosition(step=3, phase="forward"),
            running=lambda: self.running,
            failed=lambda part, error: self.failures.append(part),
            look=self.look,
        )
        monkeypatch.setattr(death_watch, "time", SimpleNamespace(perf_counter=self.clock))
        monkeypatch.setattr(death_watch, "batch_elements", self.elements)
        monkeypatch.setattr(cuda, "initialized", lambda: self.initialized)
        monkeypatch.setattr(cuda, "attach_oom_observer", self.attach)
        monkeypatch.setattr(cuda, "counters", lambda device: DeviceCounters())

    def clock(self) -> float:
        return self.now

    def elements(self, frames: Any) -> int | None:
        self.now += self.took
        if isinstance(self.batch, BaseException):
            raise self.batch
        return self.batch

    def look(self, frames: Sequence[FrameType]) -> Census:
        self.looked.append(len(frames))
        return census()

    def attach(self, observer: Callable[..., None] | None) -> bool:
        self.observers.append(observer)
        return True

    def backward(self, batch: int | BaseException | None) -> int | None:
        self.now += 1.0
        self.batch = batch
        return self.watch.backward_begins()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize(("took", "due"), [(0.0, 10.02), (4e-5, 10.02), (1e-4, 10.05), (0.01, 15.0)])
def test_readings_are_apart_and_take_a_five_hundredth_of_the_time(took: float, due: float) -> None:
    assert BatchPolicy().next_s(10.0, took) == pytest.approx(due)


def test_a_batch_is_read_when_its_reading_is_due(program: Watched) -> None:
    program.took = 0.01  # which allows another one in five seconds
    assert program.backward(80) == 80
    assert program.backward(90) is None
    program.now += 2.9
    assert program.backward(90) is None
    program.now += 2.0
    assert program.backward(90) == 90


def test_batches_vary_from_the_second_size_on(program: Watched) -> None:
    watch = program.watch
    assert watch.batches_vary is None
    program.backward(None)
    assert (watch.batches_vary, watch.batch_elements) == (None, None)
    program.backward(80)
    program.backward(80)
    assert (watch.batches_vary, watch.batch_elements) == (False, 80)
    program.backward(90)
    program.backward(90)
    assert (watch.batches_vary, watch.batch_elements) == (True, 90)


def test_the_largest_batch_is_one_whose_backward_has_ended(program: Watched) -> None:
    watch = program.watch
    watch.backward_ends()
    assert watch.largest_batch is None
    for batch in (80, 100, 90):
        program.backward(batch)
        if batch != 100:
            watch.backward_ends()
    assert watch.largest_batch == 90
    program.backward(70)
    watch.backward_ends()
    assert watch.largest_batch == 90


def test_a_reading_that_fails_is_noted_and_leaves_the_program_alone(program: Watched) -> None:
    assert program.backward(ValueError("odd")) is None
    assert program.failures == ["batch size"]
    with pytest.raises(KeyboardInterrupt):
        program.backward(KeyboardInterrupt())


def test_failing_allocations_are_observed_once_cuda_is_there(program: Watched) -> None:
    program.watch.observe()
    program.watch.stop()
    assert program.observers == []
    program.initialized = True
    program.watch.observe()
    program.watch.observe()
    assert len(program.observers) == 1
    program.watch.stop()
    assert program.observers[1:] == [None]


def test_three_failing_allocations_are_looked_at(program: Watched) -> None:
    program.initialized = True
    program.watch.observe()
    observer = program.observers[0]
    assert observer is not None
    program.running = False
    observer(0, 5, 100, 1)
    assert program.looked == []
    program.running = True
    assert torch.is_grad_enabled()
    for _ in range(5):
        observer(0, 5, 100, 1)
    assert program.looked == [0, 0, 0]
    assert not program.watch.look_at(RuntimeError("out of memory")), "it was looked at as it failed"
    finding = program.watch.finding(RuntimeError("CUDA out of memory"), [])
    assert (finding.device, finding.bytes, finding.step) == ("cuda:0", 5, 3)


def test_an_error_that_no_observer_saw_is_looked_at_with_its_frames(program: Watched) -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        assert program.watch.look_at(error)
    assert program.looked == [1]


def test_a_census_that_fails_leaves_the_counters(program: Watched) -> None:
    def fails(frames: Any) -> Census:
        raise ValueError("no room")

    watch = DeathWatch(
        position=lambda: TrainingPosition(step=3, phase="backward"), running=lambda: True,
        failed=lambda part, error: program.failures.append(part), look=fails,
    )  # fmt: skip
    program.initialized = True
    watch.observe()
    observer = program.observers[-1]
    assert observer is not None
    observer(1, 7, 100, 1)
    assert program.failures == ["census at the out-of-memory error"]
    assert watch.finding(RuntimeError("CUDA out of memory"), []).device == "cuda:1"
