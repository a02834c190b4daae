"""Death of memory: which error it was, and when it struck, told by the frames of its traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from memtriage.model.blocks import DeviceCounters
from memtriage.model.census import StorageRecord
from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPosition
from memtriage.session.death import (
    FailedAllocation,
    device_of,
    died_of_memory,
    error_frames,
    memory_error,
    owners_of,
)

torch = pytest.importorskip("torch")
PIB = 1 << 50


def at(steps: int = 3, backwards: int = 3, largest: int | None = None) -> TrainingPosition:
    return TrainingPosition(step=steps, backwards=backwards, largest_batch=largest)


def caught(action: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as error:
        action()
    return error.value


def died(action: Callable[[], Any], position: TrainingPosition | None = None) -> Finding:
    return died_of_memory(caught(action), None, position or at(), [], "RAM, 8.0 GiB")


# --- which error --------------------------------------------------------------------------------------------


def test_torch_and_python_and_numpy_run_out_of_memory() -> None:
    for action in (
        lambda: torch.empty(PIB, dtype=torch.uint8),
        lambda: bytearray(1 << 62),
        lambda: __import__("numpy").empty(PIB),
    ):
        error = caught(action)
        assert memory_error(error) is error


@pytest.mark.parametrize("error", [None, ValueError("the loss is nan"), KeyboardInterrupt(), SystemExit(1)])
def test_other_ends_are_no_death_of_memory(error: BaseException | None) -> None:
    assert memory_error(error) is None


def test_an_error_raised_from_a_memory_error_is_one() -> None:
    def framework() -> None:
        try:
            torch.empty(PIB, dtype=torch.uint8)
        except RuntimeError as error:
            raise RuntimeError("training failed at batch 7") from error

    error = caught(framework)
    assert memory_error(error) is error.__cause__


def test_an_error_while_a_survived_one_is_handled_is_not() -> None:
    def clumsy() -> None:
        try:
            torch.empty(PIB, dtype=torch.uint8)
        except RuntimeError:
            raise ValueError("no smaller batch")  # noqa: B904

    assert memory_error(caught(clumsy)) is None


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    first, second = ValueError("odd"), TypeError("odder")
    first.__cause__, second.__cause__ = second, first
    assert memory_error(first) is None


def test_frames_are_innermost_first() -> None:
    def outer() -> None:
        inner()

    def inner() -> None:
        raise MemoryError

    names = [frame.f_code.co_name for frame in error_frames(caught(outer))]
    assert names[:2] == ["inner", "outer"]


# --- when ---------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Computes, and then asks for too much where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.large = True

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        if self.large:
            scratch = torch.empty(PIB, dtype=torch.uint8)
            y = y + scratch.sum()
        return y


class Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * torch.empty(PIB, dtype=torch.uint8).sum()


def train_step(rows: int = 8) -> None:
    x = torch.randn(rows, 4)
    Layer()(x).sum().backward()


def test_in_the_forward_of_a_longer_batch() -> None:
    finding = died(train_step, at(largest=16))
    assert (finding.phase, finding.playbook, finding.step) == ("forward", "M16", 3)
    assert (finding.kind, finding.device, finding.bytes) == ("out_of_memory", "cpu", PIB)
    assert any("32 elements, the largest before it 16 (2.00 times)" in line for line in finding.evidence)
    assert "the limit: RAM, 8.0 GiB" in finding.evidence


def first_backward() -> None:
    Burst.apply(torch.randn(4, requires_grad=True)).sum().backward()


def first_optimizer_step() -> None:
    weight = torch.nn.Parameter(torch.zeros(1).expand(PIB))
    weight.grad = torch.zeros(1).expand(PIB)
    torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False).step()


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluate() -> None:
    Layer()(torch.randn(8, 4))


@pytest.mark.parametrize(
    ("action", "position", "phase", "playbook"),
    [
        (train_step, at(largest=32), "forward", "M21"),  # a batch as any
        (train_step, at(steps=0, backwards=0), "forward", "M4"),
        (first_backward, at(steps=0, backwards=0), "backward", "M14"),
        (first_optimizer_step, at(steps=0, backwards=1), "optimizer", "M17"),
        (evaluate, at(), "evaluation", "M15"),
    ],
)
def test_the_phase_is_read_from_the_frames(
    action: Callable[[], None], position: TrainingPosition, phase: str, playbook: str
) -> None:
    finding = died(action, position)
    assert (finding.phase, finding.playbook, finding.step) == (phase, playbook, position.step)


def test_in_an_evaluation_with_gradients() -> None:
    def validate() -> None:
        x = torch.randn(8, 4)
        Layer()(x)

    finding = died(validate)
    assert (finding.phase, finding.playbook) == ("evaluation", "M15")
    assert "gradients were enabled" in finding.evidence
    assert "no_grad" in (finding.fix or "")


@pytest.mark.parametrize(("inputs", "phase"), [(1, "forward"), (2, "evaluation")])
def test_one_input_alone_does_not_say_that_gradients_are_off(inputs: int, phase: str) -> None:
    """A layer that fails at its first operation has computed nothing yet: its only tensor is its input."""

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any, y: Any) -> Any:
            return torch.empty(PIB)

    x = torch.ones(4)
    finding = died(lambda: First()(x, torch.ones(4) if inputs == 2 else None))
    assert finding.phase == phase


def test_python_s_own_memory_is_the_host_s() -> None:
    finding = died(lambda: bytearray(1 << 62))
    assert (finding.device, finding.playbook, finding.bytes) == ("host", "M3", None)


# --- what the allocator's observer saw ----------------------------------------------------------------------

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which "
    "1.00 GiB is free. Including non-PyTorch memory, this process has 138.00 GiB memory in use. Of the "
    "allocated memory 137.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
    "unallocated."
)


def failed(device: str = "cuda:0") -> FailedAllocation:
    return FailedAllocation(
        device, 2 << 30, 140 << 30, 1 << 30,
        replace(at(0, 1), phase="optimizer", grad_enabled=True),
        DeviceCounters(),
        owners=[("parameter", 100 << 30), ("gradient", 37 << 30)],
    )  # fmt: skip


def test_the_observer_s_word_counts_for_the_device_that_failed() -> None:
    finding = died_of_memory(torch.OutOfMemoryError(OOM), failed(), at(9, 9), [("variable", 5)], None)
    assert (finding.device, finding.phase, finding.playbook) == ("cuda:0", "optimizer", "M17")
    assert (finding.step, finding.bytes) == (0, 2 << 30)
    assert "parameter 100.0 GiB" in (finding.mechanism or "")


def test_an_earlier_failure_on_another_device_says_nothing() -> None:
    finding = died_of_memory(torch.OutOfMemoryError(OOM), failed("cuda:1"), at(9, 9), [], None)
    assert (finding.device, finding.step) == ("cuda:0", 9)


def test_a_message_without_figures_takes_the_observer_s() -> None:
    finding = died_of_memory(torch.OutOfMemoryError("CUDA out of memory."), failed(), at(), [], None)
    assert (finding.device, finding.bytes) == ("cuda:0", 2 << 30)


def test_without_an_observer_the_host_s_limit_is_no_device_s() -> None:
    error = torch.OutOfMemoryError(OOM)
    finding = died_of_memory(error, None, at(), [("parameter", 5)], "MemTotal, 8.0 GiB")
    assert finding.device == device_of(error) == "cuda:0"
    assert not any("MemTotal" in sentence for sentence in finding.evidence)
    assert "alive at that instant: parameter 5 B" in finding.evidence


def test_what_names_no_device_is_the_host_s() -> None:
    assert {device_of(caught(lambda: bytearray(1 << 62))), device_of(caught(lambda: torch.empty(PIB)))} == {
        "cpu"
    }


def test_owners_are_summed_by_device_largest_first() -> None:
    storages = [
        StorageRecord(device=device, address=i, nbytes=nbytes, owner=owner)
        for i, (device, nbytes, owner) in enumerate(
            [
                ("cpu", 5, "parameter"),
                ("cpu", 9, "variable"),
                ("cuda:0", 99, "gradient"),
                ("cpu", 6, "parameter"),
            ]
        )
    ]  # type: ignore[misc]
    assert owners_of(storages, "cpu") == [("parameter", 11), ("variable", 9)]
    assert owners_of(storages, "cuda:0") == [("gradient", 99)]
    assert owners_of(storages, "cuda:1") == []
