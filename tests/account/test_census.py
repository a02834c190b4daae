"""The census: what hangs on the autograd graph, and a closer look at groups."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from memtriage.account.census import CensusView
from memtriage.model.paths import in_words
from memtriage.observe.autograd import unread_saved_tensors
from support.paths import of_module
from support.torch_state import shows_saved_tensors

shown = shows_saved_tensors()

SAVERS = ("Sin", "Cos")

PRELUDE = """
import collections, functools
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

def T(**options):
    return made(torch.ones(100, **options))

def leaf():
    return torch.ones(100, requires_grad=True)

class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, give):
        give(ctx)
        return x * 1
    @staticmethod
    def backward(ctx, g):
        return g, None

calls = collections.Counter()

def block(x):
    calls['block'] += 1
    return (x * 2).sin()

class Packed:
    def __init__(self, t):
        self.t = t

def pack(t):
    return Packed(made(t.detach().clone()))

def unpack(packed):
    calls['unpack'] += 1
    return packed.t
"""

# case: (source, holder paths, owner)
GRAPH: dict[str, tuple[str, set[str], str]] = {
    "saved by an operator": (
        "def product():\n    return T(requires_grad=True) * T(requires_grad=True)\nproducts = [product()]",
        {f"train.products[*] -> grad_fn MulBackward0 -> saved {name}" for name in ("self", "other")},
        "saved for backward",
    ),
    "saved further down": (
        "def chain():\n    h = made(leaf().sin())\n    for _ in range(4): h = made(h.sin())\n"
        "    return h.cos().sum()\nchains = [chain()]",
        {f"train.chains[*] -> grad_fn SumBackward0 -> … -> {name}Backward0 -> saved self" for name in SAVERS},
        "saved for backward",
    ),
    "saved by a custom function": (
        "saver = Wrap.apply(leaf(), lambda ctx: ctx.save_for_backward(T()))",
        {"train.saver -> grad_fn WrapBackward -> saved[0]"},
        "saved for backward",
    ),
    "context attribute": (
        "losses = {'lm': [Wrap.apply(leaf(), lambda ctx: setattr(ctx, 'attr', T()))]}",
        {"train.losses['lm'][*] -> grad_fn WrapBackward -> ctx.attr"},
        "autograd context",
    ),
    "context tuple": (
        "outs = {'lm': [Wrap.apply(leaf(), lambda ctx: setattr(ctx, 'context', (1, T()))) for _ in 'abc']}",
        {"train.outs['lm'][*] -> grad_fn WrapBackward -> ctx.context[1]"},
        "autograd context",
    ),
    "context list": (
        "lister = Wrap.apply(leaf(), lambda ctx: setattr(ctx, 'stash', [0, T()]))",
        {"train.lister -> grad_fn WrapBackward -> ctx.stash[1]"},
        "autograd context",
    ),
    "context dict": (
        "dicter = Wrap.apply(leaf(), lambda ctx: setattr(ctx, 'table', {'a': T()})).sum()",
        {"train.dicter -> grad_fn SumBackward0 -> … -> WrapBackward -> ctx.table['a']"},
        "autograd context",
    ),
    "packed object": (
        "with torch.autograd.graph.saved_tensors_hooks(pack, unpack): packed = leaf().exp().sum()",
        {"train.packed -> grad_fn SumBackward0 -> … -> ExpBackward0 -> saved result.t"},
        "saved for backward",
    ),
    "saved on the CPU": (
        "with torch.autograd.graph.save_on_cpu(): offloaded = leaf().exp().sum()\n"
        "made(offloaded.grad_fn.next_functions[0][0]._raw_saved_result.data[1])",
        {"train.offloaded -> grad_fn SumBackward0 -> … -> ExpBackward0 -> saved result[1]"},
        "saved for backward",
    ),
    "reentrant checkpoint's input": (
        "def reentrant():\n    return checkpoint(torch.sin, made(leaf() * 1), use_reentrant=True).sum()\n"
        "again = reentrant()",
        {"train.again -> grad_fn SumBackward0 -> … -> CheckpointFunctionBackward -> saved[0]"},
        "saved for backward",
    ),
    "leaf at the end": (
        "end = T(requires_grad=True).sum()",
        {"train.end -> grad_fn SumBackward0 -> … -> AccumulateGrad -> variable"},
        "variable",
    ),
    "closure of a node's hook": (
        "def watch():\n    scale = T()\n    y = leaf() * 2\n"
        "    y.grad_fn.register_hook(lambda g, _: scale.sum() and None)\n    return y\nwatched = watch()",
        {"C++ or an evaluation stack -> OrderedDict[*] -> closure of <lambda>: scale"},
        "variable",
    ),
}


@pytest.fixture(scope="module")
def graph_paths(gallery: Callable[..., Any]) -> Any:
    sources = {case: source for case, (source, _, owner) in GRAPH.items() if _is_shown(owner)}
    return gallery(sources, PRELUDE)


def _is_shown(owner: str) -> bool:
    return owner != "saved for backward" or unread_saved_tensors() is None


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if _is_shown(owner) else shown) for case, (_, _, owner) in GRAPH.items()],
)
def test_path_through_the_graph(graph_paths: Any, case: str) -> None:
    _, holders, owner = GRAPH[case]
    assert graph_paths.holders(case) == holders
    assert graph_paths.owners(case) == {owner}


def test_group_knows_when_its_nodes_were_created(program: Any) -> None:
    program.run(PRELUDE)
    program.run("state = leaf()\nfor _ in range(3): state = state * 2")
    before = made_of(program, "state")
    program.run("state = state * 2")
    longer = made_of(program, "state")
    program.run("state = leaf() * 2 * 2 * 2 * 2 * 2")
    replaced = made_of(program, "state")
    assert longer == (before[0], before[1] + 1)  # the leaf's own node is not counted
    assert replaced[0] > longer[1]


def made_of(program: Any, variable: str) -> tuple[int, int]:
    pairs: list[tuple[int, int]] = []
    anchor = of_module("train", variable)

    def note(view: CensusView) -> None:
        pairs.extend(g.made for g in view.census().groups if g.anchor == anchor and g.made is not None)

    program.look(note)
    return pairs[0]


@shown
def test_packed_tensors_are_not_unpacked(graph_paths: Any) -> None:
    assert graph_paths["calls"]["unpack"] == 0


@shown
def test_checkpointed_function_is_not_run_again(program: Any) -> None:
    program.run(PRELUDE)
    program.run("kept = [checkpoint(block, made(leaf() * 1), use_reentrant=False).sum()]")

    program.look()
    (record,) = program.records()
    # The placeholder that the pack hook returned leads to the checkpoint, and that to its input.
    assert record.holder.startswith(
        "train.kept[*] -> grad_fn SumBackward0 -> … -> SinBackward0 -> saved self -> checkpoint."
    )
    assert record.owner == "saved for backward"
    assert program["calls"]["block"] == 1
    program["kept"][0].backward()
    assert program["calls"]["block"] == 2


def test_heads_tell_what_is_written_to_from_what_is_lengthened(program: Any) -> None:
    heads: dict[str, frozenset[bytes]] = {}
    program.run(
        """
        import torch
        many = [torch.ones(256) for _ in range(100)]
        filled = torch.full((8192,), 7, dtype=torch.uint8)
        single = [filled.clone()]
        bank = torch.nn.Module(); bank.register_buffer("queue", filled.clone())
        two = [torch.ones(4096), torch.ones(4096)]
        """
    )
    program.look(
        lambda view: heads.update(
            {in_words(anchor): head for (device, anchor), head in view.heads().items() if device == "cpu"}
        )
    )
    mine = {anchor: head for anchor, head in heads.items() if anchor.startswith("train.")}
    ones = b"\0\0\x80?" * 16
    sevens = dict.fromkeys(("train.filled", "train.single[*]", "train.bank.queue"), frozenset([b"\7" * 64]))
    assert mine == sevens | {"train.two[*]": frozenset([ones])}


def test_a_census_while_a_tuple_is_being_built(program: Any) -> None:
    """A time mark may come at any place of the program: here, within the generator that `tuple()` reads."""
    program.run(PRELUDE)
    program.run(
        "def layers():\n    yield made(torch.zeros(8))\n    look()\n    yield torch.zeros(8)\n"
        "built = tuple(layers())"
    )
    # From CPython 3.14 on tuple() makes the tuple when it has all items.
    holder = "C++ -> Tensor" if sys.version_info >= (3, 14) else "C++ or an evaluation stack -> tuple[*]"
    assert program.holders() == {holder}
    assert len(program["built"]) == 2


def test_an_object_of_a_saved_tensor_whose_node_is_gone_is_not_read() -> None:
    """Reading it would crash the process: it refers to a place in the node, and does not keep it alive."""
    program = """
import torch
from memtriage.account.census import take_census
result = torch.ones(100, requires_grad=True).exp()
kept = result.grad_fn._raw_saved_result
del result
take_census()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
