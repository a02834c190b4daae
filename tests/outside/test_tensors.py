"""Tensors, storages and autograd nodes read by their addresses: those of this process, which are known."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memtriage.observe.tensors import StorageFacts
from memtriage.outside.memory import ProcessMemory
from memtriage.outside.objects import RemoteHeap
from memtriage.outside.python_layout import layout_of
from memtriage.outside.tensors import TorchReader
from memtriage.outside.torch_layout import TorchLayout, calibrate

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)


@pytest.fixture(scope="module")
def layout() -> TorchLayout:
    return calibrate()


def heap() -> RemoteHeap:
    """The objects of this process as they are now."""
    python = layout_of(sys.version_info[:2])
    assert python is not None
    return RemoteHeap(ProcessMemory(os.getpid()), python, lambda address: address)


@pytest.fixture
def reader(layout: TorchLayout) -> Callable[[], TorchReader]:
    """Makes a reader of this process as it is now."""
    return lambda: TorchReader(heap(), layout)


def test_a_tensor_and_its_storage(reader: Callable[[], TorchReader]) -> None:
    weight, view, empty = torch.ones(5, 7), torch.ones(100)[10:20], torch.ones(0)
    meta, shared = torch.ones(3, device="meta"), torch.ones(1000).share_memory_()
    read = reader()

    def storage(tensor: Tensor) -> StorageFacts | None:
        found = read.tensor(id(tensor))
        assert found and read.wrapper(found) == id(tensor)
        return read.storage(found)

    for tensor in (weight, view, shared):
        own = tensor.untyped_storage()
        assert storage(tensor) == StorageFacts("cpu", own.data_ptr(), own.nbytes())
    assert storage(empty) is None and storage(meta) is None
    assert [read.is_shared(facts) for facts in (storage(weight), storage(shared)) if facts] == [False, True]
    assert not read.is_shared(StorageFacts("cuda:0", shared.data_ptr(), 4))
    assert read.tensor(id(object())) == 0 == read.defined(8) == read.defined(read.tensor(id(weight)) + 1)


def test_gradients_nodes_and_bases(reader: Callable[[], TorchReader]) -> None:
    leaf = nn.Parameter(torch.ones(4))
    middle = leaf * 2
    retained = middle + 1
    retained.retain_grad()
    view = retained[1:]
    view.sum().backward(retain_graph=True)
    bare = torch.ones(4, requires_grad=True)
    gradients = leaf.grad, retained.grad  # these objects of Python are there from now on
    read = reader()

    def wrapped(address: int) -> int:
        return read.wrapper(address) if address else 0

    tensors = {"leaf": leaf, "middle": middle, "retained": retained, "view": view, "bare": bare}
    of = {name: read.tensor(id(tensor)) for name, tensor in tensors.items()}
    assert {name: wrapped(read.gradient(tensor)) for name, tensor in of.items()} == {
        "leaf": id(gradients[0]), "middle": 0, "retained": id(gradients[1]), "view": 0, "bare": 0,
    }  # fmt: skip
    assert {name: wrapped(read.base(tensor)) for name, tensor in of.items()} == {
        "leaf": 0, "middle": 0, "retained": 0, "view": id(retained), "bare": 0,
    }  # fmt: skip
    nodes = {name: read.node(tensor) for name, tensor in of.items()}
    assert nodes["leaf"] == nodes["bare"] == 0
    assert [read.node_name(nodes[name]) for name in ("middle", "retained", "view")] == [
        "MulBackward0", "AddBackward0", "SliceBackward0",
    ]  # fmt: skip
    parts = read.tensor_parts(np.array(list(of.values()), np.int64))
    assert parts.nodes.tolist() == list(nodes.values())
    assert parts.gradients.tolist() == [read.gradient(tensor) for tensor in of.values()]
    assert parts.bases.tolist() == [read.base(tensor) for tensor in of.values()]
    assert parts.wrappers.tolist() == [id(tensor) for tensor in tensors.values()]
    live = read.live(np.array([*of.values(), nodes["middle"]], np.int64))  # a node is no tensor
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors.values()]
    assert live.sizes.tolist() == [*sizes, 0] and live.parts[0][0].tolist() == [*of.values(), 0]


def test_a_graph_leads_to_its_leaves_and_to_what_it_saved(reader: Callable[[], TorchReader]) -> None:
    leaf, factor = nn.Parameter(torch.ones(4)), torch.full((4,), 3.0, requires_grad=True)
    product = leaf * factor
    loss = torch.cat([product, product]).sum()
    read = reader()
    total = read.node(read.tensor(id(loss)))
    assert read.node_name(total) == "SumBackward0"
    (joined,) = read.next_nodes(total)
    assert read.node_name(joined) == "CatBackward0"
    times, again = read.next_nodes(joined)
    assert times == again == read.node(read.tensor(id(product)))
    assert read.leaf(times) == 0
    leaves = [read.leaf(node) for node in read.next_nodes(times)]
    assert [read.wrapper(tensor) for tensor in leaves] == [id(leaf), id(factor)]
    assert [read.node_name(node) for node in read.next_nodes(times)] == ["AccumulateGrad"] * 2
    saved = {one.name: read.storage(one.tensor) for one in read.saved(times)}
    assert {name: facts.address for name, facts in saved.items() if facts} == {
        "self": leaf.data_ptr(), "other": factor.data_ptr(),
    }  # fmt: skip
    assert read.saved(total) == [] and read.unread == set()
    assert read.saved(read.next_nodes(times)[0]) == []


@pytest.mark.parametrize("left", [0, 40, "next"])
def test_what_was_freed_while_it_was_read_is_no_node(
    reader: Callable[[], TorchReader], left: int | str
) -> None:
    """The first word of freed memory is malloc's: nothing, a number, or the address of the next free one."""
    loss = nn.Parameter(torch.ones(4)).exp().sum()
    read = reader()
    total = read.node(read.tensor(id(loss)))
    (exp,) = read.next_nodes(total)
    memory = read._heap.memory
    for freed, before in ((exp, total), (total, read.tensor(id(loss)))):
        word = freed + 64 if left == "next" else left
        memory.put(np.array([freed], np.int64), np.array([[word]], np.int64))
        if before == total:
            assert read.next_nodes(total) == []
            parts = {name: found.tolist() for name, found, _ in read.node_parts(np.array([total]))}
            assert parts["next"] == [0]
        else:
            assert read.node(before) == 0
            assert read.tensor_parts(np.array([before])).nodes.tolist() == [0]


def test_after_its_backward_a_node_saves_nothing(reader: Callable[[], TorchReader]) -> None:
    leaf = nn.Parameter(torch.ones(4))
    product = leaf * torch.full((4,), 3.0)
    product.sum().backward()
    read = reader()
    assert read.saved(read.node(read.tensor(id(product)))) == []


def test_lists_of_saved_tensors_have_places(reader: Callable[[], TorchReader]) -> None:
    several = [torch.full((4,), float(number), requires_grad=True) for number in range(3)]
    grid = torch.ones(4, requires_grad=True)
    found = grid[torch.tensor([0, 1]), None]
    stacked = torch.stack([one.exp() for one in several])
    read = reader()
    indexed = read.saved(read.node(read.tensor(id(found))))
    assert all(one.tensor for one in indexed)
    (*exps,) = read.next_nodes(read.node(read.tensor(id(stacked))))
    results = [read.saved(node) for node in exps]
    assert [[(one.name, one.place) for one in each] for each in results] == [[("result", None)]] * 3


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        one, other = ctx.saved_tensors
        return gradient * other, gradient * one


def test_a_custom_function_is_its_class_and_saves_in_order(reader: Callable[[], TorchReader]) -> None:
    one, other = torch.ones(4, requires_grad=True), torch.full((4,), 2.0, requires_grad=True)
    result = Twice.apply(one, other)
    node = result.grad_fn
    read = reader()
    found = read.node(read.tensor(id(result)))
    assert read.node_name(found) == "TwiceBackward"
    assert read.node_wrapper(found) == id(node)
    assert [(saved.name, saved.place) for saved in read.saved(found)] == [("", 0), ("", 1)]
    addresses = [read.storage(saved.tensor) for saved in read.saved(found)]
    assert [facts.address for facts in addresses if facts] == [one.data_ptr(), other.data_ptr()]


def test_what_a_pack_hook_returned_is_found(reader: Callable[[], TorchReader]) -> None:
    packed: list[object] = []

    def pack(tensor: Tensor) -> object:
        packed.append([tensor])
        return packed[-1]

    leaf = nn.Parameter(torch.ones(4))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0]):
        product = leaf * torch.full((4,), 3.0, requires_grad=True)
    read = reader()
    saved = read.saved(read.node(read.tensor(id(product))))
    assert sorted(one.packed for one in saved) == sorted(id(each) for each in packed)
    assert {(one.name, one.tensor) for one in saved} == {("self", 0), ("other", 0)}


def test_many_objects_are_tensors_or_none(layout: TorchLayout) -> None:
    some: list[Any] = [torch.ones(2), object(), nn.Parameter(torch.ones(2)), [1]]
    objects = heap()
    read = TorchReader(objects, layout)
    places = objects.memory.places(np.array(list(map(id, some)), np.int64))
    assert read.tensors(places).tolist() == [read.tensor(id(each)) for each in some]
    assert [bool(each) for each in read.tensors(places).tolist()] == [True, False, True, False]
