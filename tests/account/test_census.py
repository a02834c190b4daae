"""The census: what hangs on the autograd graph, and a closer look at groups."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from memtriage.account.census import CensusView
from memtriage.model.census import GroupDetail
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


KiB = 1024
CACHE = "functools.lru_cache build[*]"
ANCHORS = (
    *(
        "train.alone[*]",
        "train.half[*]",
        "train.loss",
        "train.records[*].value",
        "train.plain",
        "train.graphs[*]",
        "train.weights[*]",
    ),
    *("train.recent[*]", "train.endless[*]", "train.pairs[*][0]", "train.lists[*][*]"),
    *("train.many[*]", CACHE),
)
NOWHERE = ("cpu", of_module("train", "nowhere"))


class Closer:
    """One closer look at the groups of a program, shared by the tests below."""

    def __init__(self, program: Any) -> None:
        self.many = [id(tensor) for tensor in program["many"]]
        self.asked: list[int] = []
        self.details: dict[str, GroupDetail] = {}
        self.heads: dict[str, bytes] = {}
        program.look(self.ask)
        self.groups = {
            in_words(group.anchor): group for group in program.census.groups if group.device == "cpu"
        }

    def site_of(self, obj: Any) -> str | None:
        if id(obj) in self.many:
            self.asked.append(id(obj))
        return "train.py:2 in build" if len(self.asked) == 3 else None

    def ask(self, view: CensusView) -> None:
        groups = {
            in_words(group.anchor): group.key for group in view.census().groups if group.device == "cpu"
        }
        keys = [groups[anchor] for anchor in ANCHORS]
        details = view.details([*keys, NOWHERE], self.site_of)
        self.details = {in_words(anchor): detail for (_, anchor), detail in details.items()}
        self.heads = {
            in_words(anchor): head for (device, anchor), head in view.heads().items() if device == "cpu"
        }


@pytest.fixture(scope="module")
def closer(gallery: Callable[..., Any]) -> Closer:
    source = """
        import collections, functools, torch
        def build(*_): return torch.ones(256)
        alone = [build() for _ in range(3)]
        half = [build(), build()]
        loss = half[0]
        losses = [loss, build()]
        class Record:
            def __init__(self): self.value = build()
        records = [Record() for _ in range(3)]
        plain = build()
        def graph():
            x = torch.ones(256, requires_grad=True)
            return x.exp().sin().sum()
        graphs = [graph() for _ in range(2)]
        weights = [torch.nn.Parameter(build()) for _ in range(3)]
        for each in weights: each.grad = build()
        del each
        recent = collections.deque([build() for _ in range(3)], maxlen=5)
        endless = collections.deque([build()])
        pairs = collections.deque([(build(), 1)], maxlen=5)
        lists = collections.deque([[build(), build()]], maxlen=5)
        masks = functools.lru_cache(maxsize=7)(build); [masks(i) for i in range(4)]
        many = [build() for _ in range(100)]
        filled = torch.full((8192,), 7, dtype=torch.uint8)
        single = [filled.clone()]
        bank = torch.nn.Module(); bank.register_buffer("queue", filled.clone())
        two = [torch.ones(4096), torch.ones(4096)]
        """
    return Closer(gallery({}, source))


def test_retained_bytes_leave_out_what_others_hold(closer: Closer) -> None:
    details = closer.details
    assert details["train.alone[*]"].retained == 3 * KiB
    assert details["train.half[*]"].retained == KiB
    assert details["train.loss"].retained == 0
    assert [in_words(path) for path in details["train.loss"].also_held_by] == [
        "train.half[*]",
        "train.losses[*]",
    ]
    assert details["train.records[*].value"].retained == 3 * KiB
    assert details["train.plain"].retained == KiB  # not the whole module's
    assert details["train.nowhere"] == GroupDetail()
    assert details["train.weights[*]"].retained == 3 * KiB  # the gradients are a group of their own


@shown
def test_a_graph_is_retained_as_a_whole(closer: Closer) -> None:
    group = closer.groups["train.graphs[*]"]
    assert group.attached
    assert group.count == 6  # of each graph: the leaf, the result of exp, the loss
    assert closer.details["train.graphs[*]"].retained == group.nbytes
    assert not closer.groups["train.alone[*]"].attached


def test_bounds_and_kinds_of_holders(closer: Closer) -> None:
    anchors = ("train.recent[*]", "train.endless[*]", CACHE, "train.many[*]")
    details = [closer.details[anchor] for anchor in anchors]
    assert [(each.bound, each.entries, each.holder_kind) for each in details] == [
        (5, 3, "deque"),
        (None, 1, "deque"),
        (7, 4, "_lru_cache_wrapper"),
        (None, 100, "list"),
    ]


def test_a_bound_holds_for_fields_of_entries_but_not_for_their_own_entries(closer: Closer) -> None:
    assert closer.details["train.pairs[*][0]"].bound == 5
    assert closer.details["train.lists[*][*]"].bound is None


def test_sites_are_asked_for_from_both_ends(closer: Closer) -> None:
    assert closer.asked[:3] == [closer.many[at] for at in (-1, 0, -2)]
    assert closer.details["train.many[*]"].allocated_at == "train.py:2 in build"
    assert closer.details["train.plain"].allocated_at is None


def test_heads_tell_what_is_written_to_from_what_is_lengthened(closer: Closer) -> None:
    mine = {anchor: head for anchor, head in closer.heads.items() if anchor.startswith("train.")}
    ones = b"\0\0\x80?" * 16
    sevens = dict.fromkeys(("train.filled", "train.single[*]", "train.bank.queue"), b"\7" * 64)
    assert mine == sevens | {"train.two[*]": 2 * ones}


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


def test_a_generator_of_a_loop_leads_to_the_line_that_stores_in_it(program: Any) -> None:
    """Only the loop that runs it has it: none of the program's variables do."""
    stored = []

    def ask(view: CensusView) -> None:
        (key,) = (group.key for group in view.census().groups if "earlier" in in_words(group.anchor))
        stored.append(
            view.details([key], lambda _: None, named=lambda stack: str(stack[0][1]))[key].stored_at
        )

    program.run(PRELUDE)
    program.module.ask = ask
    program.run(
        "def batches(sizes):\n    earlier = []\n    for n in sizes:\n        earlier.append(torch.ones(n))\n"
        "        yield n\ndef train():\n    for n in batches([4000]): look(ask)\ntrain()"
    )
    line = 1 + program.file.read_text().splitlines().index("        earlier.append(torch.ones(n))")
    assert stored == [str(line)]


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
