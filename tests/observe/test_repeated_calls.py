"""When a program works: what a reading of the stacks shows inside calls of modules and of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from memtriage.observe.repeated_calls import RepeatedCalls


class Reading(torch.nn.Module):
    """Reads the stacks in its forward, a few times in each call."""

    def __init__(self, calls: RepeatedCalls, times: int = 1) -> None:
        super().__init__()
        self.calls, self.times = calls, times
        self.shown: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shown += [self.calls.seen() for _ in range(self.times)]
        return x


def test_a_program_that_calls_no_module_is_not_seen_to_work() -> None:
    calls = RepeatedCalls()
    assert [calls.seen() for _ in range(3)] == [False] * 3


def test_a_module_that_is_called_in_a_loop_is() -> None:
    model = torch.nn.Sequential(reading := Reading(RepeatedCalls()))
    for _ in range(3):
        model(torch.zeros(1))
    assert reading.shown[:2] == [False, True]


def test_one_call_is_no_loop_however_long_it_takes() -> None:
    model = torch.nn.Sequential(*[reading := Reading(RepeatedCalls(), times=3)] * 2)
    model(torch.zeros(1))
    assert reading.shown == [False] * 6


def test_calls_by_several_lines_are_no_loop() -> None:
    reading = Reading(RepeatedCalls())
    reading(torch.zeros(1))
    reading(torch.zeros(1))
    assert reading.shown == [False] * 2


@pytest.mark.parametrize("computes", ["gradients", "gradients in a call"])
def test_gradients_count_unless_a_call_computes_them(computes: str) -> None:
    """The compiler traces a backward in the first call of what it compiles."""
    calls, shown = RepeatedCalls(), []

    def differentiate(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: shown.append(calls.seen()))
        return torch.autograd.grad(x.square().sum(), x)[0]

    class Differentiating(torch.nn.Module):
        forward = staticmethod(differentiate)

    run: Callable[[torch.Tensor], Any] = differentiate if computes == "gradients" else Differentiating()
    run(torch.zeros(2, requires_grad=True))
    assert shown == [computes == "gradients"]


def test_a_compiled_function_in_a_loop_is_seen_and_compiled_once() -> None:
    calls, shown, compiled = RepeatedCalls(), [], []

    def backend(graph: Any, inputs: object) -> Callable[..., Any]:
        compiled.append(graph)

        def run(*args: Any) -> Any:
            shown.append(calls.seen())
            return graph.forward(*args)

        return run

    double = torch.compile(lambda x: 2 * x, backend=backend)
    for _ in range(3):
        double(torch.zeros(2))
    assert len(compiled) == 1
    assert shown[:2] == [False, True]


def test_a_tracer_that_begins_during_a_marked_call_sees_nothing_of_it() -> None:
    events: list[str] = []

    class Tracing(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            sys.settrace(tracer)
            return x

    def tracer(frame: FrameType, event: str, argument: object) -> None:
        events.append(frame.f_code.co_name)

    model, before = Tracing(RepeatedCalls()), sys.gettrace()
    try:
        model(torch.zeros(1))
    finally:
        sys.settrace(before)
    assert "_wrapped_call_impl" not in events
