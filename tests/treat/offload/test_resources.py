"""What an optimizer owns: it comes when it is needed, ends with work that fails, and goes with `close`."""

from __future__ import annotations

import _thread
import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from memtriage.treat.offload.arithmetic import Arithmetic
from memtriage.treat.offload.pipeline import Job, TileSlot
from support.offload import (
    Pair,
    give_gradients,
    make,
    masters_of,
    parameters,
    same_bits,
)


class FailingJob:
    """A tile's computation that is never begun."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def start(self) -> None:
        pass

    def wait(self) -> None:
        raise self.error


def failing_kernel(at: int, error: BaseException | None) -> Callable[..., Job]:
    """Stands in for `Arithmetic.stepping`: one tile fails, or has the main thread interrupted."""
    stepping, calls = Arithmetic.stepping, count(1)

    def stand_in(*arguments: Any) -> Job:
        if next(calls) == at:
            if error is not None:
                return FailingJob(error)
            _thread.interrupt_main()
        return stepping(*arguments)

    return stand_in


def test_a_failure_in_the_middle_of_a_step_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    optimizer = pair.optimizer
    pair.train(0)
    model = [weight.detach().clone() for weight in pair.weights]
    checkpoint = copy.deepcopy(optimizer.state_dict())

    pair.give(1)
    with monkeypatch.context() as patch:
        failing = failing_kernel(3, RuntimeError("the device fell off the bus"))
        patch.setattr(Arithmetic, "stepping", failing)
        with pytest.raises(RuntimeError, match="fell off the bus"):
            optimizer.step()
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"failed in the middle.*fell off the bus.*state_dict"):
            call()

    optimizer.load_state_dict(checkpoint)
    with torch.no_grad():
        for weight, value in zip(pair.weights, model, strict=True):
            weight.copy_(value)
    pair.step()
    pair.assert_same()


def test_a_failure_before_the_first_change_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.give(0)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no copy today")

    with monkeypatch.context() as patch:
        patch.setattr(TileSlot, "fetch", refuse)
        with pytest.raises(RuntimeError, match="no copy today"):
            pair.optimizer.step()
    assert all(same_bits(weight, other) for weight, other in zip(pair.weights, parameters(), strict=True))
    pair.step()
    pair.assert_same()


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_a_failure_behind_the_backward_pass_ends_the_work(
    monkeypatch: pytest.MonkeyPatch, gradients: str
) -> None:
    weight = Parameter(torch.ones(300))
    optimizer = make([weight], overlap_backward=True, gradients=gradients)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no copy today")

    with monkeypatch.context() as patch:
        patch.setattr(TileSlot, "fetch", refuse)
        (weight * 2).sum().backward()
        with pytest.raises(RuntimeError, match="no copy today"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="failed in the middle"):
        optimizer.step()


def test_ctrl_c_lets_the_step_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.give(0)
    with monkeypatch.context() as patch:
        patch.setattr(Arithmetic, "stepping", failing_kernel(2, None))
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
    pair.expected.step()
    pair.assert_same()
    pair.train(1)
    pair.assert_same()


def test_a_forked_child_is_told_that_it_has_no_part_in_it() -> None:
    weights = parameters([(10,)])
    optimizer = make(weights)
    give_gradients(weights, masters_of(weights), seed=0)
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        except RuntimeError as error:
            told = "parent process" in str(error)
            optimizer.close()  # of threads that it does not have
            os._exit(0 if told else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.step()


def test_close_gives_everything_back() -> None:
    weights = parameters()
    optimizer = make(weights, overlap_backward=True)
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()
    assert not optimizer.pinned
    kept = optimizer.state_dict()["state"][0]["exp_avg"]
    expected = kept.clone()
    optimizer.close()
    optimizer.close()
    assert optimizer.host_bytes == 0
    assert not optimizer.state
    assert torch.equal(kept, expected)
    sum(weight.sum() for weight in weights).backward()  # no hook is left
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_an_optimizer_let_go_of_ends_its_thread_and_its_hooks() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("memtriage-offload")]

    gc.collect()
    before = threads()
    weights = parameters()
    optimizer = make(weights, overlap_backward=True)
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()
    mine = [thread for thread in threads() if thread not in before]
    gone = weakref.ref(optimizer)
    assert mine
    del optimizer
    gc.collect()
    assert gone() is None
    for tensor in mine:
        tensor.join(timeout=60)
        assert not tensor.is_alive()
    sum(weight.sum() for weight in weights).backward()
    assert weights[0].grad is not None
