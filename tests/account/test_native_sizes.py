"""The memory of autograd nodes and tensor objects is estimated close to what malloc counts."""

from __future__ import annotations

import pytest

from memtriage.account.census import Look, take_census
from memtriage.account.native_sizes import NativeSizer, NativeSizes
from memtriage.model.paths import in_words
from memtriage.observe.autograd import NodeReader
from memtriage.observe.identity import Identities
from support.own_process import printed_by

torch = pytest.importorskip("torch")

MEASURED = """
import gc
import torch
from memtriage.account.census import take_census
from memtriage.observe.malloc import malloc_info

weight = torch.ones(8, 8, requires_grad=True)
state = weight * 2
kept = []

def grow(times):
    global state
    for _ in range(times):
        {body}

def totals():
    estimated = sum(group.on_host for group in take_census().groups)
    gc.collect()
    info = malloc_info()
    return estimated, info.in_use

grow(20)
totals()
before = totals()
grow(400)
after = totals()
print(round(100 * (after[0] - before[0]) / (after[1] - before[1])))
"""
BODIES = {
    "freed graphs": "h = ((weight @ weight).relu() * 2).sum(); h.backward(); kept.append(h)",
    "whole graphs": "kept.append((weight * 2).exp().add(1).mul(weight).sum())",
    "a chain": "state = state + weight",
    "splits": "kept.append(weight.unsafe_chunk(8)[0].sum())",
    "detached numbers": "kept.append(weight.detach().sum())",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_census_estimates_what_malloc_counts(body: str) -> None:
    """Nodes that save sizes are larger; Python's part of a tensor is in its own arenas (136 in 3.14)."""
    (percent,) = printed_by(MEASURED.format(body=body))
    assert 75 <= percent <= 140


def test_a_tensor_is_larger_by_its_python_object_and_by_what_gradients_need() -> None:
    sizer = NativeSizer(NodeReader(), NativeSizes(tensor=1000, wrapper=100, gradient=10))
    plain, leaf = torch.ones(1), torch.ones(1, requires_grad=True)
    assert [sizer.tensor(plain, saved=saved) for saved in (False, True)] == [1100, 1000]
    assert [sizer.tensor(leaf, saved=saved) for saved in (False, True)] == [1110, 1010]


def test_a_storage_on_a_gpu_is_larger_by_the_allocator_s_block() -> None:
    sizes = NativeSizes(storage=1000, block=100)
    assert (sizes.storage_on("cpu"), sizes.storage_on("cuda:1")) == (1000, 1100)


def test_a_node_is_larger_by_its_edges_and_by_what_it_saves() -> None:
    sizer = NativeSizer(NodeReader(), NativeSizes(node=1000, edge=100, saved=10, shape=1))
    leaf = torch.ones(3, 4, requires_grad=True)
    assert sizer.node((leaf * leaf).grad_fn) == 1000 + 2 * 100 + 2 * 10
    assert sizer.node(leaf.sum().grad_fn) == 1000 + 100 + 1  # the sizes of its operand
    assert sizer.node((leaf * 2 * leaf).grad_fn) == 1220  # one of a known type


def test_nodes_without_a_storage_have_a_group_of_their_own() -> None:
    leaf = torch.ones(3, requires_grad=True)
    nodes = [(leaf + 1).grad_fn for _ in range(5)]
    with Look((), Identities()) as view:
        census = view.census()
    (group,) = [g for g in census.groups if in_words(g.anchor).endswith("nodes[*]")]
    assert (group.device, group.count, group.nbytes, group.attached) == ("cpu", 0, 0, True)
    assert group.objects >= 5 and group.on_host == group.kept >= 5 * 464
    assert list(group.holders.values()) == [0]
    assert len(nodes) == 5


def test_what_is_kept_is_in_no_storage_and_counted_once() -> None:
    leaf = torch.ones(100, requires_grad=True)
    before = take_census()
    losses = [(leaf * 2).sum() for _ in range(10)]
    after = take_census()
    grown = sum(g.objects for g in after.groups) - sum(g.objects for g in before.groups)
    assert grown == after.nodes - before.nodes == 21  # two a loss, and the leaf's one
    assert sum(g.nbytes for g in after.groups) == sum(s.nbytes for s in after.storages)
    assert len(losses) == 10
