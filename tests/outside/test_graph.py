"""Where each address of another process is in what a walk has found."""

from __future__ import annotations

import torch

from memtriage.observe.kinds import LOCALS, NODE, PLAIN, TENSOR
from memtriage.outside.graph import Positions, RemoteGraph
from memtriage.outside.own_memory import own_words
from memtriage.outside.tensors import TorchReader
from support.outside_parts import heap_now, known_python, own_build
from support.remote_memory import SIZE, START, FakeMemory


def test_an_address_is_entered_fenced_or_not_met() -> None:
    memory = FakeMemory(bytes(SIZE))
    index = Positions(memory)
    first, second, fenced, unmet = (START + 64 * at for at in range(1, 5))
    index.enter(first, 0)
    index.enter(second, 7)
    index.fence(fenced)
    index.fence(second)  # it is entered already
    state = [(address in index, index.is_entered(address)) for address in (first, second, fenced, unmet)]
    assert state == [(True, True), (True, True), (True, False), (False, False)]
    memory = FakeMemory(bytes(SIZE))
    assert index.by_place[[memory.place(each) for each in (first, second, fenced, unmet)]].tolist() == [
        1,
        8,
        -1,
        0,
    ]


def test_what_is_not_mapped_is_never_entered() -> None:
    index = Positions(FakeMemory(bytes(SIZE)))
    for address in (0, 8, START - 8, START + 2 * SIZE):
        index.enter(address, 3)
        index.fence(address)
        assert address in index
        assert not index.is_entered(address)


@known_python
def test_the_class_of_an_object_is_that_of_its_part_in_python() -> None:
    class Thing:
        pass

    thing, trained = Thing(), torch.ones(4, requires_grad=True)
    trained.sum().backward()
    sine = trained.exp().sin()
    made_by = sine.grad_fn
    node = own_words(id(made_by), 3)[2]
    heap = heap_now()
    reader = TorchReader(heap, own_build()[2])
    graph = RemoteGraph(heap, reader)
    (before,), gradient = reader.next_nodes(node), reader.gradient(trained._cdata)  # only C++ has objects
    graph.objects = [id(thing), sine._cdata, node, before, gradient, id(thing)]
    graph.kinds = [PLAIN, TENSOR, NODE, NODE, TENSOR, LOCALS]
    classes = [graph.type_at(at) for at in range(6)]
    names = [None if klass is None else klass.name for klass in classes]
    assert names == ["Thing", "Tensor", type(made_by).__name__, None, None, None]
    assert [graph.kind(at) for at in range(6)] == graph.kinds
