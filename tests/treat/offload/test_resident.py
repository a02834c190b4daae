"""One parameter's memory on the host: whose elements, when it must be read again, which states fit it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from memtriage.treat.offload.resident import ResidentParameter, settle_in


def resident(weights: Tensor, ranks: int = 1, rank: int = 0, *, gradients: bool = False) -> ResidentParameter:
    made = ResidentParameter(Parameter(weights), "layer.weight", ranks, rank)
    settle_in([made], torch.float32, gradients=gradients)
    return made


def test_memory_is_zero_and_apart_for_each_parameter() -> None:
    some = [ResidentParameter(Parameter(torch.ones(size)), str(size), 1, 0) for size in (3, 100)]
    nbytes = settle_in(some, torch.bfloat16, gradients=True)
    assert [one.master.numel() for one in some] == [3, 100]
    assert nbytes >= (64 + 128) * (4 + 2 + 2 + 4), "each begins at a multiple of 64 elements"
    for one in some:
        assert (one.master.dtype, one.exp_avg.dtype, one.exp_avg_sq.dtype) == (
            torch.float32, torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        assert one.gradient is not None and one.gradient.dtype == torch.float32
        for tensor in (one.master, one.exp_avg, one.exp_avg_sq, one.gradient):
            tensor.add_(1)
    assert all(float(one.master.sum()) == one.master.numel() for one in some)
    assert resident(torch.ones(3)).gradient is None


def test_weights_come_in_the_order_of_memory() -> None:
    across = torch.arange(6.0).view(2, 3).t()
    one = resident(across)
    assert one.weights().tolist() == [0, 1, 2, 3, 4, 5]
    one.parameter.grad = torch.ones(3, 2).cumsum(0).contiguous()
    gradient = one.device_gradient()
    assert gradient is not None and gradient.tolist() == [1, 2, 3, 1, 2, 3]
    one.parameter.grad = None
    assert one.device_gradient() is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (torch.ones(3), r"was \(4,\) torch.float32 when the optimizer was made and is \(3,\)"),
        (torch.ones(4, dtype=torch.bfloat16), r"is \(4,\) torch.bfloat16 now"),
        (torch.ones(4, 2)[:, 0], "make a new optimizer after changing parameters"),
    ],
)
def test_a_parameter_that_is_another_now_is_refused(changed: Tensor, words: str) -> None:
    one = resident(torch.ones(4))
    one.parameter.data = changed
    with pytest.raises(RuntimeError, match=words):
        one.weights()


def test_memory_that_is_gone_is_noticed() -> None:
    one = resident(torch.ones(4))
    one.parameter.grad = torch.ones(4)
    one.parameter.grad.untyped_storage().resize_(15)
    with pytest.raises(RuntimeError, match=r"the memory of the gradient of layer.weight has been freed"):
        one.device_gradient()
    one.parameter.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"the memory of layer.weight has been freed"):
        one.weights()
    assert resident(torch.ones(0)).weights().numel() == 0


def test_a_sparse_gradient_is_refused() -> None:
    one = resident(torch.ones(4))
    one.parameter.grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        one.device_gradient()


def test_weights_that_somebody_else_wrote_to_are_unseen() -> None:
    one = resident(torch.ones(4))
    assert one.unseen()
    one.saw()
    assert not one.unseen()
    with torch.no_grad():
        one.parameter.add_(1)
    assert one.unseen()
    one.saw()
    one.parameter.data = torch.ones(4)
    assert one.unseen()


@pytest.mark.parametrize(
    ("weights", "keys"),
    [(torch.ones(2, 3), {"step", "exp_avg", "exp_avg_sq"}),
     (torch.ones(2, 3, dtype=torch.bfloat16), {"step", "exp_avg", "exp_avg_sq", "master"})],
)  # fmt: skip
def test_its_entry_of_the_state_has_the_parameters_shape(weights: Tensor, keys: set[str]) -> None:
    one = resident(weights)
    assert one.published(None) and not one.published({})
    entry = one.publish()
    assert set(entry) == keys and one.publish() is entry
    assert entry["exp_avg"].shape == (2, 3)
    entry["exp_avg"][1, 2] = 7.0
    assert one.exp_avg.tolist() == [0, 0, 0, 0, 0, 7]
    assert one.published(entry) and not one.published(None) and not one.published(dict(entry))
    entry["exp_avg"] = torch.zeros(2, 3)
    assert not one.published(entry)


def test_a_share_of_several_ranks_is_published_flat() -> None:
    one = resident(torch.ones(2, 300), 2, 1)
    assert one.publish()["exp_avg"].shape == (one.share.length,)


def test_forgotten_it_is_as_new() -> None:
    one = resident(torch.ones(4))
    entry = one.publish()
    entry["exp_avg"].fill_(1)
    entry["exp_avg_sq"].fill_(1)
    one.step.fill_(3)
    one.saw()
    one.forget()
    assert (float(one.exp_avg.sum()), float(one.exp_avg_sq.sum()), float(one.step)) == (0, 0, 0)
    assert one.unseen() and one.published(None)


def state(shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"step": 2, "exp_avg": torch.full(shape, 3.0), "exp_avg_sq": torch.full(shape, 4.0), **more}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (state((2, 3), max_exp_avg_sq=torch.ones(2, 3)), "comes from amsgrad"),
        ({"step": 1}, "lacks exp_avg, exp_avg_sq"),
        (state((3, 2)), r"exp_avg of layer.weight has shape \(3, 2\), expected \(2, 3\)"),
        (state((2, 3), master=torch.ones(6)), r"master of layer.weight has shape \(6,\), expected \(2, 3\)"),
    ],
)
def test_a_state_of_another_parameter_is_refused(entry: dict[str, Any], words: str) -> None:
    one = resident(torch.ones(2, 3))
    one.check(state((2, 3)), partitioned=False)
    with pytest.raises(ValueError, match=words):
        one.check(entry, partitioned=False)


def test_a_state_is_loaded_in_the_order_of_memory() -> None:
    one = resident(torch.arange(6.0).view(2, 3).t())
    one.saw()
    moments = torch.arange(6.0).view(3, 2)
    one.load(state((3, 2), exp_avg=moments), partitioned=False)
    assert one.exp_avg.tolist() == [0, 2, 4, 1, 3, 5]
    assert (float(one.step), one.exp_avg_sq.tolist()) == (2, [4.0] * 6)
    assert one.unseen(), "without a master it is not known"
    one.load(state((3, 2), master=moments), partitioned=False)
    assert one.known and one.master.tolist() == [0, 2, 4, 1, 3, 5]
    assert one.unseen(), "whether the weights are the master's is open"


def test_of_a_partition_the_share_is_loaded() -> None:
    whole = torch.arange(600.0)
    shares = [resident(torch.ones(600), 2, rank) for rank in (0, 1)]
    for one in shares:
        one.load({**state((600,)), "exp_avg": whole}, partitioned=False)
    assert torch.cat([one.exp_avg for one in shares])[:600].tolist() == whole.tolist()
    own = torch.full((shares[1].share.length,), 5.0)
    shares[1].check({**state(tuple(own.shape)), "exp_avg": own}, partitioned=True)
    shares[1].load({**state(tuple(own.shape)), "exp_avg": own}, partitioned=True)
    assert shares[1].exp_avg.tolist() == own.tolist()


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        (torch.ones(2, dtype=torch.float64), TypeError, "layer.weight is torch.float64"),
        (torch.ones(2, device="meta"), ValueError, "layer.weight is on meta"),
        (torch.ones(4, 4)[:, ::2], ValueError, "not dense"),
    ],
)
def test_parameters_that_cannot_be_offloaded(weights: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resident(weights)
