"""What an object keeps alive through C++."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memtriage.observe import autograd
from memtriage.observe.edges import edges, hidden_attributes, is_sparse, sparse_parts, tensor_referents
from memtriage.observe.kinds import FUTURE, LOCALS, NODE, PLACEHOLDER, PLAIN, SAVED, TENSOR, FrameLocals
from memtriage.observe.objects import Listing
from support.torch_state import shows_saved_tensors


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


def test_gradients_nodes_and_bases_of_tensors() -> None:
    weight = torch.ones(4, requires_grad=True)
    assert not is_in(None, tensor_referents(weight))
    product = weight * 2
    product.retain_grad()
    product.sum().backward()
    assert is_in(weight.grad, tensor_referents(weight))
    assert is_in(product.grad, tensor_referents(product)) and is_in(
        product.grad_fn, tensor_referents(product)
    )
    view = weight.detach().view(2, 2)
    assert is_in(view._base, tensor_referents(view))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_made_of_their_parts() -> None:
    dense = torch.eye(3)
    assert not is_sparse(dense)
    coo = dense.to_sparse().requires_grad_()
    for sparse, count in ((coo, 2), (dense.to_sparse_csr(), 3), (dense.to_sparse_csc(), 3)):
        assert is_sparse(sparse)
        parts = sparse_parts(sparse)
        assert len(parts) == count and not any(part.requires_grad for part in parts)
        assert {part.data_ptr() for part in parts} <= {
            part.data_ptr() for part in tensor_referents(sparse) if isinstance(part, torch.Tensor)
        }


def test_each_kind_has_its_own_edges() -> None:
    reader = autograd.NodeReader()
    tensor = torch.ones(1, requires_grad=True)
    held = {"a": tensor}
    frame = next(frame_of() for _ in range(1))
    assert is_in(tensor, edges(held, PLAIN, reader))
    assert is_in((tensor * 2).grad_fn.next_functions[0][0], edges((tensor * 2).grad_fn, NODE, reader))
    assert edges(frame, LOCALS, reader) == list(frame.values)
    future: torch.futures.Future[list[int]] = torch.futures.Future()
    assert not is_in(held, edges(future, FUTURE, reader))
    future.set_result(held)  # type: ignore[arg-type]
    assert is_in(held, edges(future, FUTURE, reader))


@shows_saved_tensors()
def test_what_graphs_save_and_checkpoints_recompute_from_have_their_own_edges() -> None:
    reader = autograd.NodeReader()
    x = torch.ones(4, requires_grad=True)
    product = x * 1
    node = product.sin().grad_fn
    assert is_in(product, edges(node, NODE, reader))
    assert is_in(product.grad_fn, edges(product, TENSOR, reader))
    assert edges(node._raw_saved_self, SAVED, reader) == []  # it does not keep the node alive
    out = checkpoint(lambda given: given.sin().exp(), x * 1, use_reentrant=False)
    ((_, _, placeholder),) = reader.saved_values(out.grad_fn)
    reader.find_checkpoints(Listing(gc.get_objects()))
    assert [type(each).__name__ for each in edges(placeholder, PLACEHOLDER, reader)][-1] == "_CheckpointFrame"


def test_asking_a_failed_future_leaves_no_trace_in_its_error() -> None:
    error = ValueError("of the program")
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_exception(error)
    for _ in range(3):
        assert not is_in(error, edges(future, FUTURE, autograd.NodeReader()))
    assert error.__traceback__ is None
    with pytest.raises(ValueError, match="of the program"):
        future.wait()
    before = traceback.extract_tb(error.__traceback__)
    edges(future, FUTURE, autograd.NodeReader())
    assert traceback.extract_tb(error.__traceback__) == before


def frame_of() -> FrameLocals:
    kept = [1, 2]
    assert kept
    return FrameLocals(sys._getframe(), None)
