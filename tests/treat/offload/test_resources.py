"""What an optimizer owns: it comes when it is needed, ends with work that fails, and goes with `close`."""

from __future__ import annotations

import _thread
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
from memtriage.treat.offload.resources import OptimizerResources
from memtriage.treat.offload.settings import OffloadSettings
from support.offload import (
    assert_same_as_reference,
    give_gradients,
    make,
    masters_of,
    parameters,
    reference,
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
    weights = parameters()
    masters = masters_of(weights)
    optimizer, expected = make(weights), reference(masters)
    give_gradients(weights, masters, seed=0)
    optimizer.step()
    expected.step()
    model = [weight.detach().clone() for weight in weights]
    kept = {
        key: {k: v.clone() for k, v in entry.items()}
        for key, entry in optimizer.state_dict()["state"].items()
    }
    checkpoint = {"state": kept, "param_groups": optimizer.state_dict()["param_groups"]}

    give_gradients(weights, masters, seed=1)
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
        for weight, value in zip(weights, model, strict=True):
            weight.copy_(value)
    optimizer.step()
    expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)


def test_a_failure_before_the_first_change_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = parameters()
    masters = masters_of(weights)
    optimizer, expected = make(weights), reference(masters)
    give_gradients(weights, masters, seed=0)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no copy today")

    with monkeypatch.context() as patch:
        patch.setattr(TileSlot, "fetch", refuse)
        with pytest.raises(RuntimeError, match="no copy today"):
            optimizer.step()
    assert all(same_bits(weight, other) for weight, other in zip(weights, parameters(), strict=True))
    optimizer.step()
    expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)


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
    weights = parameters()
    masters = masters_of(weights)
    optimizer, expected = make(weights), reference(masters)
    give_gradients(weights, masters, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(Arithmetic, "stepping", failing_kernel(2, None))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)
    give_gradients(weights, masters, seed=1)
    optimizer.step()
    expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)


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


def settings(**changed: Any) -> OffloadSettings:
    return OffloadSettings(
        **{
            "state_dtype": torch.float32, "gradients": "device", "overlap_backward": False, "max_norm": None,
            "reduce_gradients": False, "tile_elements": 128, "ring_depth": 2, "pin_memory": True,
            "kernel": "torch",
        } | changed
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "each"),
    [({}, 12), ({"gradients": "host"}, 16), ({"state_dtype": torch.bfloat16}, 8)],
)
def test_host_memory_is_counted_by_what_is_kept(changed: dict[str, Any], each: int) -> None:
    resources = OptimizerResources(settings(**changed), None)
    assert (resources.host_bytes, resources.pinned, resources.compiled) == (0, False, False)
    with pytest.raises(RuntimeError, match=r"^this OffloadedAdamW is closed$"):
        resources.check_open()
    resources.run([], lambda engine, bucket: None)
    first, second = Parameter(torch.ones(1024)), Parameter(torch.ones(4096))
    (one,) = resources.admit([first], ["first"])
    engine = resources.engine
    scratch = 128 * 4 * (1 if resources.settings.state_dtype == torch.float32 else 3)
    assert (engine.arithmetic.nbytes, engine.ring.nbytes) == (scratch, 2 * 2 * 256)
    assert resources.host_bytes == each * 1024 + 1024 + scratch
    (other,) = resources.admit([second], ["second"])
    assert resources.engine is engine
    assert resources.host_bytes == each * (1024 + 4096) + 1024 + scratch
    assert resources.residents == {first: one, second: other}
    assert (one.name, other.name) == ("first", "second")
    resources.close()
    resources.close()
    assert (resources.host_bytes, resources.residents) == (0, {})
    with pytest.raises(RuntimeError, match="closed"):
        resources.check_usable()


@pytest.mark.parametrize(
    ("submitted", "changing", "torn"), [(False, False, False), (False, True, True), (True, False, True)]
)
def test_work_that_failed_ends_all_unless_it_is_whole_and_changed_nothing(
    submitted: bool, changing: bool, torn: bool
) -> None:
    resources = OptimizerResources(settings(), None)
    weight = Parameter(torch.ones(300))
    (resident,) = resources.admit([weight], ["w"])
    weight.grad = torch.ones(300)
    buckets = resources.buckets([(0, resident, weight.grad)], reduced=True)
    done: list[bool] = []

    def work(engine: Any, bucket: Any) -> None:
        assert engine is resources.engine
        assert bucket is buckets[0]
        done.append(engine.changing)
        engine.changing = changing
        raise ValueError("in the middle")

    resources.run([], work)
    assert done == []
    resources.engine.changing = True
    with pytest.raises(ValueError, match="in the middle"):
        resources.submit(buckets[0], work).result() if submitted else resources.run(buckets, work)
    assert done == [False]
    if torn:
        with pytest.raises(RuntimeError) as caught:
            resources.check_usable()
        assert str(caught.value) == (
            "an earlier step failed in the middle (ValueError: in the middle): some parameters have taken "
            "it, others not. Load the last state_dict() and the weights saved with it, then continue"
        )
        resources.mended()
    resources.check_usable()
    resources.close()
