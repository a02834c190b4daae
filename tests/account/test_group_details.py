"""A closer look at groups of storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from memtriage.account.census import CensusView
from memtriage.model.census import GroupDetail
from memtriage.model.paths import in_words
from support.paths import of_module
from support.torch_state import shows_saved_tensors

shown = shows_saved_tensors()

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


@pytest.fixture(scope="module")
def closer(only_new_objects: None, gallery: Callable[..., Any]) -> Closer:
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


def test_a_generator_of_a_loop_leads_to_the_line_that_stores_in_it(program: Any) -> None:
    """Only the loop that runs it has it: none of the program's variables do."""
    stored = []

    def ask(view: CensusView) -> None:
        (key,) = (group.key for group in view.census().groups if "earlier" in in_words(group.anchor))
        stored.append(
            view.details([key], lambda _: None, named=lambda stack: str(stack[0][1]))[key].stored_at
        )

    program.run("import torch")
    program.module.ask = ask
    program.run(
        "def batches(sizes):\n    earlier = []\n    for n in sizes:\n        earlier.append(torch.ones(n))\n"
        "        yield n\ndef train():\n    for n in batches([4000]): look(ask)\ntrain()"
    )
    line = 1 + program.file.read_text().splitlines().index("        earlier.append(torch.ones(n))")
    assert stored == [str(line)]


# --- what the program's classes, source and graph say -------------------------------------------------------

PROGRAM = """
import collections, contextvars, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1024)
    def forward(self, x):
        return self.fc(x).relu().sum()

class Trainer:
    def __init__(self):
        self.history = []
    def step(self, model):
        self.history.append(model(torch.ones(64, 4)))

model = Net()
trainer = Trainer()
for _ in range(2):
    trainer.step(model)

leaf = torch.ones(300, requires_grad=True)
total = torch.zeros(300)
for _ in range(3):
    total = total + leaf.exp()

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = torch.ones(310)
        self.scale = torch.ones(310, requires_grad=True)
    def step(self):
        hidden = (self.memory * self.scale).sin()
        self.memory = hidden * 2
        return hidden
cell = Cell()
for _ in range(6):
    out = cell.step()

done = []
for _ in range(3):
    loss = leaf.exp().sum()
    loss.backward()
    done.append(loss)
del loss

penalties = []
def penalty():
    x = torch.ones(300, requires_grad=True)
    (slope,) = torch.autograd.grad(x.sigmoid().sum(), x, create_graph=True)
    penalties.append(slope.pow(2).sum())
penalty()

players = [nn.Linear(8, 32) for _ in range(3)]
pair = [nn.Linear(8, 32) for _ in range(2)]

def optimizer():
    weight = nn.Parameter(torch.ones(500))
    made = torch.optim.Adam([weight])
    weight.grad = torch.ones(500)
    made.step()
    return made
adams = [optimizer() for _ in range(3)]
adam = optimizer()
recent = collections.deque([nn.Linear(7, 7) for _ in range(3)], maxlen=5)

kept = []
def keep(module, args, output):
    kept.append(output.detach().clone())
watched = nn.Linear(8, 8)
watched.register_forward_hook(keep)
watched(torch.ones(90, 8))

shared = torch.ones(700).share_memory_()

current = contextvars.ContextVar("current")
current.set(torch.ones(800))

class Bag(list):
    pass
bag = Bag([torch.ones(600)])
"""

LINEAR = ["torch.nn.modules.linear.Linear", "torch.nn.modules.module.Module"]
ADAM = ["torch.optim.adam.Adam", "torch.optim.optimizer.Optimizer"]

# by anchor: what is told besides the container's kind and its number of entries
TOLD: dict[str, dict[str, Any]] = {
    "train.trainer.history[*]": {
        "retained": 526344, "retained_of": 526344, "saved_by": "ReluBackward0 in train.model.fc",
        "stored_at": "self.history.append(model(torch.ones(64, 4)))",
        "stored_value": "model(torch.ones(64, 4))", "classes": ["train.Trainer"],
    },
    "train.total": {
        "retained": 4800, "retained_of": 4800, "saved_by": "ExpBackward0", "carried": True,
        "differentiated": True,
        "stored_at": "total = total + leaf.exp()", "stored_value": "total + leaf.exp()",
    },
    "train.out": {
        "retained": 1240, "retained_of": 16160, "saved_by": "SinBackward0", "carried": True,
        "differentiated": True,
        "carrier": "train.cell.memory", "stored_at": "self.memory = hidden * 2", "stored_value": "hidden * 2",
    },
    "train.done[*]": {
        "retained": 12, "retained_of": 12, "backward_ran": True, "stored_at": "done.append(loss)",
        "stored_value": "loss",
    },
    "train.penalties[*]": {
        "retained": 3608, "retained_of": 3608, "saved_by": "PowBackward0", "differentiated": True,
        "stored_at": "penalties.append(slope.pow(2).sum())", "stored_value": "slope.pow(2).sum()",
    },
    "train.players[*].weight": {
        "retained": 3072, "retained_of": 3072, "collected": "module", "classes": LINEAR,
        "stored_at": "players = [nn.Linear(8, 32) for _ in range(3)]",
    },
    "train.pair[*].weight": {
        "retained": 2048, "retained_of": 2048, "classes": LINEAR,
        "stored_at": "pair = [nn.Linear(8, 32) for _ in range(2)]",
    },
    "train.recent[*].weight": {
        "retained": 588, "retained_of": 588, "bound": 5, "collected": "module", "classes": LINEAR,
        "stored_at": "recent = collections.deque([nn.Linear(7, 7) for _ in range(3)], maxlen=5)",
    },
    "train.adams[*].state[*]['exp_avg']": {
        "retained": 6000, "retained_of": 6000, "in_optimizer": True, "collected": "optimizer",
        "classes": ADAM, "stored_at": "adams = [optimizer() for _ in range(3)]",
    },
    "train.adam.state[*]['exp_avg']": {
        "retained": 2000, "retained_of": 2000, "in_optimizer": True, "classes": ADAM,
    },
    "train.adam.state[*]": {
        "retained": 0, "retained_of": 2000, "in_optimizer": True, "classes": ADAM,
        "also_held_by": ["train.adam.param_groups[*]['params'][*]"],
    },
    "train.kept[*]": {
        "retained": 2880, "retained_of": 2880, "stored_at": "kept.append(output.detach().clone())",
        "stored_value": "output.detach().clone()",
    },
    "train.shared": {
        "retained": 2800, "retained_of": 2800, "shared": True, "mapped": True,
        "stored_at": "shared = torch.ones(700).share_memory_()",
        "stored_value": "torch.ones(700).share_memory_()",
    },
    "context variable current": {
        "retained": 3200, "retained_of": 3200,
        "stored_at": 'current = contextvars.ContextVar("current")',
        "stored_value": "contextvars.ContextVar('current')",
    },
    "train.bag[*]": {
        "retained": 2400, "retained_of": 2400, "classes": ["train.Bag"],
        "stored_at": "bag = Bag([torch.ones(600)])", "stored_value": "Bag([torch.ones(600)])",
    },
}  # fmt: skip


class Told:
    """All details of a program's groups, with the lines that store; shared by the tests below."""

    def __init__(self, program: Any) -> None:
        self.file = str(program.file)
        self.lines = program.file.read_text().splitlines()
        self.details: dict[str, GroupDetail] = {}
        program.look(self.ask)

    def line(self, stack: Sequence[tuple[str, int]]) -> str:
        ((file, number),) = stack
        return str(self.lines[number - 1].strip()) if file == self.file else file

    def ask(self, view: CensusView) -> None:
        keys = [group.key for group in view.census().groups if group.device == "cpu"]
        details = view.details(keys, lambda _: None, named=self.line)
        self.details = {in_words(anchor): detail for (_, anchor), detail in details.items()}

    def of(self, anchor: str) -> dict[str, Any]:
        """What differs from the details of a group of which nothing is known, without its cuts."""
        detail, nothing = msgspec.structs.asdict(self.details[anchor]), msgspec.structs.asdict(GroupDetail())
        told = {name: value for name, value in detail.items() if value != nothing[name]}
        told["also_held_by"] = [in_words(path) for path in told.pop("also_held_by", [])]
        if "carrier" in told:
            told["carrier"] = in_words(told["carrier"])
        told = {name: value for name, value in told.items() if name not in ("cuts", "stored_depth")}
        return {name: value for name, value in told.items() if value or name == "retained"}


@pytest.fixture(scope="module")
def told(only_new_objects: None, gallery: Callable[..., Any]) -> Told:
    return Told(gallery({}, PROGRAM))


@shown
@pytest.mark.parametrize("anchor", TOLD)
def test_a_group_is_told_with_what_its_classes_source_and_graph_say(told: Told, anchor: str) -> None:
    found = told.of(anchor)
    kind, entries = found.pop("holder_kind"), found.pop("entries", None)
    assert found == TOLD[anchor]
    if anchor == "train.bag[*]":
        assert (kind, entries) == ("Bag", 1)
    if anchor in ("train.players[*].weight", "train.recent[*].weight"):
        assert entries == 3


@shown
def test_a_graph_that_packs_its_own_results_is_told(only_new_objects: None, program: Any) -> None:
    program.run(
        """
        import torch, weakref
        from torch.autograd.graph import saved_tensors_hooks
        packed = []
        def pack(tensor):
            packed.append(weakref.ref(tensor))
            return tensor
        def lost():
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                torch.ones(900, requires_grad=True).sigmoid()
        lost()
        """
    )
    told = Told(program)
    program["packed"][0]().sum().backward()  # frees what is saved, and so ends the cycle
    assert program["packed"][0]() is None
    native = [told.of(anchor) for anchor, detail in told.details.items() if detail.packs_itself]
    assert native
    assert not any("entries" in each for each in native)
    assert not any(detail.packs_itself for anchor, detail in told.details.items() if anchor[:3] != "C++")
