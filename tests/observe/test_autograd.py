"""The graph's edges are read without running anything."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import _CheckpointFrame, checkpoint

from memtriage.observe.autograd import (
    NodeReader,
    created,
    creation_site,
    is_node_type,
    next_nodes,
    unread_saved_tensors,
)
from memtriage.observe.objects import Listing
from support.torch_state import shows_saved_tensors

shown = shows_saved_tensors()


class Saver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, None, other)
        ctx.note = "kept"
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g, None


def leaf(n: int = 4) -> torch.Tensor:
    return torch.ones(n, requires_grad=True)


def saved(node: Any) -> dict[tuple[str, int | None], Any]:
    return {(name, place): value for name, place, value in NodeReader().saved_values(node)}


def test_node_types() -> None:
    out = Saver.apply(leaf(), torch.ones(4))
    assert is_node_type(type(out.grad_fn))
    assert is_node_type(type((out * 2).grad_fn))
    assert is_node_type(type(out.grad_fn.next_functions[0][0]))
    assert not is_node_type(torch.Tensor)
    assert not is_node_type(torch.nn.Linear)


@shown
def test_saved_by_an_operator() -> None:
    a, b = leaf(), leaf()
    kept = saved((a * b).grad_fn)
    assert set(kept) == {("self", None), ("other", None)}
    assert kept["self", None] is a
    assert kept["other", None] is b


@shown
def test_saved_lists_are_numbered() -> None:
    indices = [torch.tensor([0, 1]), torch.tensor([1, 0])]
    kept = saved(leaf(9).view(3, 3)[tuple(indices)].grad_fn)
    assert {key for key in kept if key[0] == "indices"} == {("indices", 0), ("indices", 1)}
    assert [kept["indices", at].data_ptr() for at in (0, 1)] == [index.data_ptr() for index in indices]


@shown
def test_saved_by_a_custom_function_without_the_unset_ones() -> None:
    x, other = leaf(), torch.ones(4)
    out = Saver.apply(x, other)  # without it, up to torch 2.11, the node saves nothing
    kept = saved(out.grad_fn)
    assert set(kept) == {("", 0), ("", 2)}
    assert kept["", 2] is other


def test_nothing_is_saved_after_backward() -> None:
    product = leaf() * leaf()
    custom = Saver.apply(leaf(), torch.ones(4))
    for out in (product, custom):
        out.sum().backward()
        assert saved(out.grad_fn) == {}


class HiddenTensor:
    """A `SavedTensor` as torch 2.8 and 2.9 have it, which does not show what it saves."""


def test_what_an_old_torch_does_not_show_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        _raw_saved_self = HiddenTensor()
        _raw_saved_tensors = (HiddenTensor(), HiddenTensor())

    assert saved(Node()) == {}
    monkeypatch.setattr(sys.modules["torch._C._autograd"], "SavedTensor", HiddenTensor)
    assert (unread_saved_tensors() or "").startswith(f"torch {torch.__version__} does not show the tensors")


@contextmanager
def packing(calls: list[str]) -> Iterator[None]:
    def unpack(packed: Any) -> Any:
        calls.append("unpack")
        return packed["tensor"]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: {"tensor": tensor.clone()}, unpack):
        yield


@shown
def test_packed_objects_are_read_without_unpacking() -> None:
    calls: list[str] = []
    with packing(calls):
        out = leaf().exp()
    (packed,) = saved(out.grad_fn).values()
    assert isinstance(packed, dict)
    assert torch.equal(packed["tensor"], out)
    assert calls == []
    out.sum().backward()
    assert calls == ["unpack"]


@shown
def test_a_tensor_changed_in_place_since_is_still_read() -> None:
    x = leaf() * 1
    out = x.sin()
    x.mul_(2)
    assert saved(out.grad_fn)["self", None].data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@shown
def test_referents_of_a_node() -> None:
    x, other = leaf(), torch.ones(4)
    out = Saver.apply(x, other)
    reader = NodeReader()
    referents = reader.referents(out.grad_fn)
    assert any(each is other for each in referents)
    # From CPython 3.14 on the node refers to its attributes, before to their dict.
    assert any(each == "kept" or (type(each) is dict and each.get("note") == "kept") for each in referents)
    (accumulates,) = next_nodes(out.grad_fn)
    assert any(each is accumulates for each in referents)
    assert any(referent is x for referent in reader.referents(accumulates))
    assert id(other) in reader.saved
    assert id(accumulates) not in reader.saved


def test_next_nodes_leave_out_inputs_without_gradient() -> None:
    assert [type(node).__name__ for node in next_nodes((leaf() * torch.ones(4)).grad_fn)] == [
        "AccumulateGrad"
    ]
    assert next_nodes(next_nodes((leaf() * 2).grad_fn)[0]) == []


def test_what_is_no_node_has_no_next_nodes_and_was_not_created_by_autograd() -> None:
    assert next_nodes(object()) == []
    assert created(object()) is None and creation_site(object()) is None


def test_nodes_are_numbered_as_they_are_created() -> None:
    first, second = (leaf() * 2).grad_fn, (leaf() * 2).grad_fn
    numbers = created(first), created(second)
    assert numbers[0] is not None and numbers[1] == numbers[0] + 1
    (accumulates,) = next_nodes(second)
    assert created(accumulates) is None


@shown
@pytest.mark.skipif(not hasattr(torch._C._autograd, "_make_saved_tensor"), reason="not in this torch")
def test_a_saved_tensor_is_followed_where_a_checkpoint_keeps_it() -> None:
    product, reader = leaf() * 1, NodeReader()
    out = checkpoint(torch.sin, product, use_reentrant=False)
    listing = Listing(gc.get_objects())
    reader.find_checkpoints(listing)
    (frame,) = listing.of_types({id(_CheckpointFrame)})
    (argument,) = [each for each in frame.saved_args if type(each).__name__ == "SavedTensor"]
    assert reader.saved_tensor_referents(argument)[0] is product
    assert reader.saved == {id(product)}
    assert reader.saved_tensor_referents(product.sin().grad_fn._raw_saved_self) == []
    assert out is not None


def test_without_the_loaded_library_there_are_no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.checkpoint")
    reader, placeholder = NodeReader(), ["kept"]
    reader.find_checkpoints(Listing(gc.get_objects()))
    assert reader.placeholder_referents(placeholder) == ["kept"]


@shown
def test_placeholders_of_a_checkpoint_lead_to_it() -> None:
    runs: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp()

    x = leaf() * 1
    out = checkpoint(block, x, use_reentrant=False)
    (placeholder,) = saved(out.grad_fn).values()
    reader = NodeReader()

    def types() -> set[str]:
        return {type(referent).__name__ for referent in reader.placeholder_referents(placeholder)}

    assert "_CheckpointFrame" not in types()
    reader.find_checkpoints(Listing(gc.get_objects()))
    assert "_CheckpointFrame" in types()
    assert runs == [1]
    out.sum().backward()
    assert runs == [1, 1]


@pytest.mark.parametrize("custom", [False, True])
def test_creation_site_is_what_anomaly_mode_noted(custom: bool) -> None:
    def forward() -> torch.Tensor:
        return Saver.apply(leaf(), torch.ones(4)) if custom else leaf() * 2

    assert creation_site(forward().grad_fn) is None
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        out = forward()
    stack = creation_site(out.grad_fn)
    assert stack is not None
    assert "in forward" in stack[-1] or "in forward" in stack[-2]
