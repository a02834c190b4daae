"""What an object keeps alive through C++."""

from __future__ import annotations

from typing import Any

import torch

from memtriage.observe.edges import hidden_attributes, tensor_referents


class WithSlot(torch.Tensor):
    __slots__ = ("scale", "unset")
    scale: torch.Tensor


def is_in(wanted: Any, objects: list[Any]) -> bool:
    return any(each is wanted for each in objects)


def test_attributes_hooks_and_slots_of_a_tensor_that_the_collector_does_not_show() -> None:
    tensor = torch.ones(4).as_subclass(WithSlot).requires_grad_()
    tensor.scale, tensor.note = torch.ones(1), "kept"
    tensor.register_hook(lambda gradient: gradient)
    hidden = hidden_attributes(tensor)
    assert (
        is_in(tensor.scale, hidden) and is_in(vars(tensor), hidden) and is_in(tensor._backward_hooks, hidden)
    )
    assert not is_in(None, hidden)


def test_attributes_of_a_parameter_that_a_graph_leads_to() -> None:
    """In torch 2.8 the collector shows nothing of it."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.main_grad = torch.ones(4)
    graph = weight * 2
    assert is_in(vars(weight), tensor_referents(weight))
    assert is_in(graph.grad_fn, tensor_referents(graph))
