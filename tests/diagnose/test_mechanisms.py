"""From real objects through the census and the holder path to the mechanism and its fix.

Each case makes what it holds as a program would; one census sees them all. The rules read the path that the
census found, so a case fails when either side changes without the other.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memtriage
from memtriage.account.census import CensusView
from memtriage.account.followed import Contents, FollowedHolders
from memtriage.diagnose.held import Held
from memtriage.diagnose.mechanisms import mechanism_of
from memtriage.model.census import GroupDetail, HolderGroup
from memtriage.model.evidence import HolderSeen
from memtriage.model.findings import Finding
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from support.censuses import census
from support.judged import a_holder, judge
from support.observed import BASE, observed
from support.own_process import printed_by
from support.paths import items_of

pytest.importorskip("torch")

PRELUDE = """
import functools, threading
import torch
from torch import nn
from torch.autograd import forward_ad

def T(*shape):
    return made(torch.ones(shape or (20_000,)))

def leaf():
    return torch.ones(20_000, requires_grad=True)

class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.context = [None, T()]
        return x * 1
    @staticmethod
    def backward(ctx, g):
        return g

class Node:
    def __init__(self, value):
        self.me, self.value = self, value

def net():
    return nn.Sequential(nn.Linear(4, 4))

def attached():
    return made((leaf() * T()).exp()).sum()

started, stop = threading.Event(), threading.Event()
"""

LARGE = 100_000

CASES: dict[str, tuple[str, str, list[str]]] = {
    "garbage": ("Node(T())", "in a cycle (Node)", ["gc.enable", "weakref"]),
    "garbage with a graph": (
        "Node(Wrap.apply(leaf()))",
        "in a cycle (",
        ["gc.enable"],
    ),
    "lengthens": ("everything = T()", "train.everything is replaced by a longer one", ["preallocated"]),
    "lengthens with a graph": (
        "seen = attached()",
        "train.seen is replaced by a longer one",
        ["end of each epoch"],
    ),
    "known": ("cache = [T()]", "train-cache", ["clear_caches(['train-cache'])", "memtriage holders"]),
    "shared": (
        "shared = [made(torch.ones(2048).share_memory_())]",
        "train.shared gets new tensors",
        ["what shared keeps", "value.clone()"],
    ),
    "shared with a graph": (
        "rows = [leaf() * made(torch.ones(20_000).share_memory_())]",
        "train.rows gets new tensors that still carry a grad_fn",
        ["bound rows"],
    ),
    "gradient with a graph": (
        "weight = leaf(); (weight ** 3).sum().backward(create_graph=True); made(weight.grad)",
        "create_graph=True",
        ["zero_grad(set_to_none=True)", "torch.autograd.grad"],
    ),
    "gradient": (
        "plain = leaf(); plain.square().sum().backward(create_graph=True); made(plain.grad)",
        "a gradient carries a graph of its own",
        ["zero_grad"],
    ),
    "gradients": (
        "leaves = [leaf() for _ in range(4)]\nfor each in leaves: each.sum().backward(); made(each.grad)\n"
        "del each",
        "train.leaves gets new tensors",
        ["`.grad = None`"],
    ),
    "context cycle": (
        "def through_cpp():\n    out = Wrap.apply(leaf())\n    out.grad_fn.result = made(out * 2)\n"
        "through_cpp()",
        "output -> grad_fn -> ctx",
        ["ctx.save_for_backward"],
    ),
    "context": (
        "losses = {'lm': [Wrap.apply(leaf()).sum()]}",
        "train.losses['lm'] keeps the node alive",
        ["`loss.detach()` (or `loss.item()`) instead", "in losses['lm']"],
    ),
    "hook": (
        "def install(model):\n    captured = {'n1': []}\n"
        "    def grab(module, args, out): captured['n1'].append(made(out.detach().clone()))\n"
        "    model.register_forward_hook(grab)\nhooked = net(); install(hooked); hooked(torch.ones(4))",
        "captured['n1'] gets new tensors",
        ["bound n1", "deque"],
    ),
    "hook with a graph": (
        "def keep(model):\n    outputs = []\n"
        "    def grab(module, args, out): outputs.append(made(out * T(4)))\n"
        "    model.register_forward_hook(grab)\nwatched = net(); keep(watched); watched(torch.ones(4))",
        "outputs gets new tensors that still carry a grad_fn",
        ["bound outputs"],
    ),
    "hook with a context": (
        "def remember(model):\n    seen = []\n"
        "    def grab(module, args, out): seen.append(Wrap.apply(out))\n"
        "    model.register_forward_hook(grab)\nlooked = net(); remember(looked); looked(torch.ones(4))",
        "`ctx.context`",
        ["`Wrap.apply(out).detach()` instead"],
    ),
    "hook object": (
        "class Recorder:\n    def __init__(self): self.inputs = []\n"
        "    def __call__(self, module, args): self.inputs.append(made(args[0].clone()))\n"
        "recorded = net(); recorded.register_forward_pre_hook(Recorder()); recorded(torch.ones(4))",
        "_forward_pre_hooks[*].inputs gets new tensors",
        ["bound inputs"],
    ),
    "list that a hook fills": (
        "class Cam:\n    def __init__(self, model):\n        self.maps = []\n"
        "        model.register_forward_hook(self.keep_map)\n"
        "    def keep_map(self, module, args, out):\n        self.maps.append(made(out.detach().clone()))\n"
        "    def other(self): self.maps.clear()\n"
        "seen_net = net(); cam = Cam(seen_net); seen_net(torch.ones(4))",
        "train.cam.maps gets new tensors",
        ["bound cam.maps"],
    ),
    "hook of a tensor": (
        "def watch(t):\n    mask = T()\n    t.register_hook(lambda g: g * mask)\n"
        "with_hook = leaf(); watch(with_hook)",
        "train.with_hook._hooks gets new hooks at every step, and none is removed",
        ["`remove()`", "handle", "`finally:`"],
    ),
    "hook of a node": (
        "class Strategy: pass\n"
        "def look_ahead():\n    strategy, mean = Strategy(), made(leaf() * T())\n"
        "    strategy.cache = {'mean': mean}\n"
        "    mean.grad_fn.register_hook(functools.partial(print, strategy))\n"
        "look_ahead()",
        "tensor -> grad_fn -> hook -> functools.partial print[0]",
        ["detached tensor in mean", "`weakref.ref()`", "`remove()`"],
    ),
    "cache": (
        "@functools.lru_cache(maxsize=None)\ndef causal_mask(n): return T()\n"
        "for n in range(3): causal_mask(n)",
        "functools.lru_cache causal_mask keeps every value",
        ["cache_clear()", "maxsize="],
    ),
    "cache of graphs": (
        "@functools.lru_cache(maxsize=None)\ndef scores(n): return attached()\nfor n in range(3): scores(n)",
        "functools.lru_cache scores",
        ["cache_clear()"],
    ),
    "traceback": (
        "errors = []\ndef failing():\n    big = T()\n    raise ValueError\n"
        "try: failing()\nexcept ValueError as error: errors.append(error)",
        "traceback",
        ["str(error)", "clear_frames"],
    ),
    "generator": (
        "def batches():\n    batch = T()\n    yield batch\nopen_ones = [batches()]; next(open_ones[0])",
        "generators that were not run to their end",
        ["close()"],
    ),
    "coroutine": (
        "import types\n@types.coroutine\ndef wait(): yield\nasync def upload(batch):\n    await wait()\n"
        "uploads = {upload(T()) for _ in 'abc'}\nfor each in uploads: each.send(None)\ndel each",
        "train.uploads keeps coroutines that have not ended",
        ["await asyncio.gather", "maxsize", "cancel()"],
    ),
    "generator that collects": (
        "def collector():\n    collected = []\n    while True: collected.append((yield T()))\n"
        "collecting = collector(); [collecting.send(each) for each in (None, T(), T())]",
        "train.collecting -> generator collector(): collected gets new tensors",
        ["bound collected", "deque(maxlen=...)"],
    ),
    "generator that collects pairs": (
        "def mixed():\n    earlier = []\n    while True: earlier.append(((yield T()), 0))\n"
        "mixing = mixed(); [mixing.send(each) for each in (None, T(), T())]",
        "train.mixing -> generator mixed(): earlier gets new tensors",
        ["bound earlier", "deque(maxlen=...)"],
    ),
    "default argument": (
        "def remember_all(x, store=[]):\n    store.append(x)\nremember_all(T())",
        "train.remember_all -> default argument of remember_all: store gets new tensors",
        ["bound store"],
    ),
    "keyword default": (
        "def note(*, book={}):\n    book['x'] = T()\nnote()",
        "default argument of note: book['x'] gets new tensors",
        ["clear x when"],
    ),
    "thread": (
        "def fill():\n    waiting = [T()]\n    started.set()\n    stop.wait()\n"
        "threading.Thread(target=fill, name='loader').start(); started.wait()",
        "waiting gets new tensors",
        ["bound waiting"],
    ),
    "threads": (
        "def watches(batch):\n    watching.release()\n    stop.wait()\n"
        "watching = threading.Semaphore(0)\n"
        "for number in range(3):\n"
        "    threading.Thread(target=watches, args=[T()], name=f'dog {number}').start()\n"
        "    watching.acquire()",
        'threads that have not ended keep what they were given: thread "dog *" frame',
        ["cancel() a `threading.Timer`", "join()", "max_workers"],
    ),
    "optimizer state": (
        "trained = net(); optimizer = torch.optim.Adam(trained.parameters())\n"
        "trained(torch.ones(4)).sum().backward()\n"
        "optimizer.step(); [made(state['exp_avg']) for state in optimizer.state.values()]",
        "the optimizer gets new parameters",
        ["optimizer.state"],
    ),
    "parameters that the optimizer alone keeps": (
        "def trained():\n    optimizer = torch.optim.Adam([leaf()])\n"
        "    for _ in range(2):\n        added = made(leaf())\n        added.grad = torch.ones_like(added)\n"
        "        optimizer.add_param_group({'params': [added]})\n        optimizer.step()\n"
        "    optimizer.param_groups.clear()\n    return optimizer\nadapting = trained()",
        "the optimizer gets new parameters",
        ["optimizer.state"],
    ),
    "parameters that a wrapper of optimizers keeps": (
        "class FlatOptimizer:\n    def __init__(self): self.state = {}\n    def step(self): pass\n"
        "    def zero_grad(self): pass\n"
        "flat = FlatOptimizer()\nfor _ in 'ab': flat.state[made(leaf())] = {'steps': 1}",
        "the optimizer gets new parameters",
        ["optimizer.state"],
    ),
    "state of a scheduler": (
        "class Warmup(torch.optim.lr_scheduler.LRScheduler):\n    def __init__(self): self.state = []\n"
        "warmup = Warmup(); warmup.state += [T(), T()]",
        "train.warmup.state gets new tensors",
        ["bound warmup.state"],
    ),
    "parameter groups": (
        "added = torch.optim.SGD([leaf()], lr=0.1)\n"
        "added.add_param_group({'params': [made(nn.Parameter(torch.ones(20_000)))]})",
        "the optimizer gets new parameters",
        ["add_param_group once"],
    ),
    "module": (
        "model = nn.ModuleDict({'heads': nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})\n"
        "[made(head.weight) for head in model['heads']]",
        "the model itself grows: train.model.heads[*].weight",
        ["register what model.heads gets once"],
    ),
    "models": (
        "class League:\n    def __init__(self): self.players = [net() for _ in range(4)]\n"
        "league = League()\n[made(player[0].weight) for player in league.players]",
        "train.league.players gets new modules",
        ["bound league.players"],
    ),
    "optimizers": (
        "optimizers = []\nfor _ in range(4):\n    each = net()\n"
        "    optimizers.append(torch.optim.Adam(each.parameters()))\n"
        "    each(torch.ones(4)).sum().backward(); optimizers[-1].step()\n"
        "    made(optimizers[-1].state[each[0].weight]['exp_avg'])\ndel each",
        "train.optimizers gets new optimizers",
        ["bound optimizers"],
    ),
    "optimizers of a library's kind": (
        "solvers = []\nfor _ in range(4):\n    each = leaf()\n"
        "    solvers.append(torch.optim.LBFGS([each], max_iter=2))\n"
        "    each.grad = torch.ones_like(each); solvers[-1].step(lambda: (each * each).sum().detach())\n"
        "    made(solvers[-1].state[each]['d'])\ndel each",
        "train.solvers gets new optimizers",
        ["bound solvers"],
    ),
    "a model of several": (
        "pair = [nn.ModuleList(net() for _ in range(3)) for _ in 'ab']\n"
        "[made(head[0].weight) for model in pair for head in model]",
        "the model itself grows",
        ["once"],
    ),
    "buffer": (
        "masked = net(); masked.register_buffer('mask_0', T())",
        "the model itself grows: train.masked.mask_0",
        ["once, before training"],
    ),
    "carried": (
        "state = attached()\nfor _ in 'ab': state = made(state * 2)",
        "train.state is carried from step to step",
        ["state = state.detach()"],
    ),
    "carried beside an output": (
        "def cell(h):\n    steps = [h]\n    for _ in range(4): steps.append((steps[-1] * T()).exp())\n"
        "    return torch.stack(steps[1:]).sum(0), steps[-1] * 1\n"
        "a_hidden = leaf()\nfor _ in 'abc': a_output, a_hidden = cell(a_hidden)",
        "train.a_hidden is carried from step to step",
        ["a_hidden = a_hidden.detach()"],
    ),
    "carried by a module": (
        "class Cell(nn.Module):\n    state = None\n    def forward(self, x):\n        steps = [self.state]\n"
        "        for _ in range(4): steps.append((steps[-1] * T()).exp())\n        state = steps[-1] * 1\n"
        "        self.state = state\n        return torch.stack(steps[1:]).sum(0)\n"
        "a_cell = Cell(); a_cell.state = leaf()\nfor _ in 'abc': an_output = a_cell(None)",
        "train.a_cell.state is carried from step to step",
        ["a_cell.state = a_cell.state.detach()"],
    ),
    "attached": (
        "history = [attached() for _ in range(2)]",
        "train.history gets new tensors that still carry a grad_fn",
        ["`value.detach()` instead of the tensor itself in history"],
    ),
    "losses": (
        "step_losses = []\nfor _ in 'ab': step_losses.append(attached())",
        "train.step_losses gets new tensors that still carry a grad_fn",
        ["`attached().detach()`", "in step_losses"],
    ),
    "actions": (
        "episode = {'actions': []}\nfor _ in 'ab':\n    action = attached()\n"
        "    episode['actions'].append(action)\ndel action",
        "train.episode['actions'] gets new tensors that still carry a grad_fn",
        ["store `action.detach()` instead", "in episode['actions']"],
    ),
    "functional update": (
        "params = {'w': leaf()}\nfor _ in 'abc': params = {k: made(p * p) for k, p in params.items()}",
        "train.params['w'] is carried from step to step",
        ["`params['w'] = params['w'].detach()`", "requires_grad_()"],
    ),
    "buffer with a graph": (
        "class Norm(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('running_mean', torch.zeros(20_000))\n"
        "    def forward(self, x): self.running_mean.mul_(0.9).add_(x)\n"
        "norm = Norm()\nfor _ in 'abc': norm(made(leaf() * 2))\nmade(norm.running_mean)",
        "train.norm.running_mean is carried from step to step",
        ["`norm.running_mean = norm.running_mean.detach()`"],
    ),
    "metric": (
        "import torchmetrics\nmetric = torchmetrics.CatMetric()\nmetric.update(T())",
        "a metric keeps what",
        ["reset()", "compute()"],
    ),
    "weak keys": (
        "import weakref\nclass Batch: pass\nclass Stats:\n    def __init__(self, batch):\n"
        "        self.batch, self.entropy = batch, T()\n"
        "by_batch = weakref.WeakKeyDictionary()\n"
        "for _ in 'abc':\n    batch = Batch(); by_batch[batch] = Stats(batch)\ndel batch",
        "a value that refers to its key keeps it alive for ever",
        ["no reference to the key", "weakref.ref()"],
    ),
    "endless loader": (
        "import itertools\nbatches = itertools.cycle(T() for _ in range(3)); next(batches); next(batches)",
        "itertools.cycle keeps every item of its first round",
        ["while True: yield from loader"],
    ),
    "finalizer": (
        "import weakref\nclass Data: pass\ndata = Data()\n"
        "def release(staging): pass\nfor step in range(3): weakref.finalize(data, release, T())",
        "a finalizer keeps its arguments until its object is gone",
        ["one finalizer for each object", "detach()"],
    ),
    "queue": (
        "import queue\nclass Writer:\n    def __init__(self): self.pending = queue.Queue()\n"
        "writer = Writer()\nfor step in range(3): writer.pending.put((step, T()))",
        "it is filled faster than it is emptied",
        ["queue.Queue(maxsize=...)", "put() waits"],
    ),
    "C++ only": (
        "level = forward_ad.enter_dual_level(); dual = forward_ad.make_dual(torch.ones(20_000), T())",
        "nothing in Python refers to these tensors",
        ["detach()"],
    ),
    "attribute": (
        "class Metrics:\n    def __init__(self): self.store = [T()]\nmetrics = Metrics()",
        "train.metrics.store gets new tensors and is never cleared",
        ["bound metrics.store", "deque(maxlen=...)"],
    ),
    "objects with a tensor each": (
        "class Episode:\n    registry = []\n    def __init__(self):\n        self.obs = T()\n"
        "        Episode.registry.append(self)\nfor _ in 'abc': Episode()",
        "train.Episode.registry gets new tensors and is never cleared",
        ["clear registry when"],
    ),
    "context variable": (
        "import contextvars\ntrail = contextvars.ContextVar('trail')\n"
        "trail.set([])\nfor _ in range(9): trail.get().append(T())",
        "context variable trail gets new tensors",
        ["clear trail when"],
    ),
    "keys alike": (
        "by_user = {f'user-{number}': T() for number in range(5)}",
        "train.by_user gets new tensors",
        ["clear by_user when"],
    ),
    "key that is no name": (
        "by_layer = {'0.weight': [T()]}",
        "train.by_layer['0.weight'] gets new tensors",
        ["clear by_layer['0.weight'] when"],
    ),
    "closure": (
        "def make():\n    kept = [T()]\n    def report(): return kept\n    return report\nreports = [make()]",
        "closure of report: kept gets new tensors",
        ["clear kept when"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def findings(only_new_objects: None, gallery: Callable[..., Any]) -> Iterator[dict[str, list[Finding]]]:
    """By case, the finding of each group of storages that the case made, as if it had just come."""
    shown: list[Any] = []
    collects = gc.isenabled()
    registration = memtriage.register_holder("train-cache", lambda: [item["cache"] for item in shown], dict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of create_graph's cycle
            sources = {case: source for case, (source, _, _) in CASES.items()}
            shown.append(gallery({"off": "import gc; gc.disable()", **sources}, PRELUDE))
        found: dict[str, list[Finding]] = {}
        shown[0].look(lambda view: found.update(findings_of(shown[0], view)))
    finally:
        if collects:
            gc.enable()
        registration.remove()
    yield found
    shown[0].run("stop.set(); forward_ad.exit_dual_level(level=level)")


def findings_of(program: Any, view: CensusView) -> dict[str, list[Finding]]:
    groups = view.census().groups
    keys = [group.key for group in groups]
    details = view.details(keys, lambda obj: None, named=lambda trace: f"train.py:{trace[0][1]} in it")
    found: dict[str, list[Finding]] = {}
    for case in CASES:
        sizes = {record.path: record.nbytes for record in program.records(case)}
        mine = [group for group in groups if sizes.keys() & group.by_path.keys()]
        found[case] = [judged(case, group, details[group.key], sizes) for group in mine]
    return found


def judged(case: str, group: HolderGroup, detail: GroupDetail, sizes: dict[HolderPath, int]) -> Finding:
    path = max(sizes.keys() & group.by_path.keys(), key=lambda path: sizes[path])
    seen = next(
        seen for seen in FollowedHolders().add(census(group), Contents({}, {})) if seen.device == group.device
    )
    return growing(msgspec.structs.replace(seen, path=path, detail=detail), case.startswith("lengthens"))


def growing(seen: HolderSeen, lengthens: bool = False) -> Finding:
    """The finding of a holder that gets as much as it has with each step, in large storages."""

    def found(at: int) -> list[HolderSeen]:
        more = 1 if lengthens else at
        entries = more if ANY_ITEM in seen.anchor else 1
        return [
            msgspec.structs.replace(
                seen, nbytes=at * LARGE * seen.storages, kept=at * seen.kept, storages=more * seen.storages,
                nodes=more * seen.nodes, entries=entries * seen.entries,
                holders=(more if seen.holders > 1 else 1) * seen.holders, continued=lengthens,
            )
        ]  # fmt: skip

    counter = [BASE + at * (LARGE * seen.storages + seen.kept) for at in range(1, 61)]
    counters = {seen.device: counter, "shared": counter}
    evidence = observed(counters, found, (15, 30, 45, 60), collector_off=True)
    (finding,) = judge(evidence, limits=False).findings
    return finding


@pytest.mark.parametrize("case", CASES)
def test_each_holder_has_its_mechanism_and_its_fix(findings: dict[str, list[Finding]], case: str) -> None:
    _, mechanism, fix = CASES[case]
    said = [finding for finding in findings[case] if mechanism in (finding.mechanism or "")]
    assert said, [(finding.holder, finding.mechanism) for finding in findings[case]]
    assert [word for word in fix if word not in (said[0].fix or "")] == [], said[0].fix


def test_a_running_total_of_losses_that_went_through_backward_carries_its_graph() -> None:
    anchor = (PathSegment(SegmentKind.MODULE, "train"), PathSegment(SegmentKind.VARIABLE, "total"))
    # The scalar alone has a storage. Its graph has lost what it saved, and is nodes only.
    scalar = HolderSeen(
        id=1, device="cpu", anchor=anchor, path=anchor, nbytes=4, storages=1, owner="variable"
    )

    def found(at: int) -> list[HolderSeen]:
        return [msgspec.structs.replace(scalar, kept=100_000 * at, nodes=20 * at)]

    counter = [BASE + 100_000 * at for at in range(1, 61)]
    (finding,) = judge(observed({"cpu": counter}, found, (15, 30, 45, 60))).findings
    assert finding.mechanism is not None and "carried from step to step" in finding.mechanism
    assert finding.fix is not None and "total = total.detach()" in finding.fix


def test_the_variable_that_carries_a_graph_is_named_for_all_of_it(findings: dict[str, list[Finding]]) -> None:
    holders = {finding.holder or "" for finding in findings["carried beside an output"]}
    assert holders and all(holder.startswith("train.a_hidden -> grad_fn") for holder in holders)


def test_the_fix_names_the_variable_of_a_running_function(program: Any) -> None:
    program.run(PRELUDE)
    program.run("def run():\n    losses = {'lm': [T()]}\n    look()", "frame")
    program["run"]()
    (record,) = program.records("frame")
    said = mechanism_of(a_holder(record.path))
    assert record.holder == "frame run(): losses['lm'][*]"
    assert said.mechanism.startswith("losses['lm'] gets new tensors")
    assert said.fix.startswith("bound losses['lm']")


@given(
    st.lists(
        st.builds(PathSegment, st.sampled_from(SegmentKind), st.text(max_size=8)), min_size=1, max_size=6
    ),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(["variable", "parameter", "gradient", "garbage", "c++ only"]),
    st.booleans(),
)
def test_every_path_is_explained(
    path: list[PathSegment], outside: int, attached: bool, owner: str, shared: bool
) -> None:
    said = mechanism_of(
        a_holder(tuple(path), anchor=tuple(path[:outside]), attached=attached, owner=owner, shared=shared)
    )
    assert said.mechanism and said.fix


LOSSES = items_of("main", "losses")


def held(path: HolderPath = LOSSES, **facts: Any) -> Held:
    return a_holder(path, attached=True, owner="saved for backward", **facts)


def test_without_a_backward_nothing_is_to_be_recorded() -> None:
    said = mechanism_of(held(gradients=False))
    assert "no backward has run" in said.mechanism and "torch.no_grad()" in said.fix
    assert "inference_mode()" in said.fix
    assert mechanism_of(held(gradients=False, differentiated=True)) == mechanism_of(held(differentiated=True))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("torchmetrics.metric.Metric", "reset()"),
        ("torchmetrics.wrappers.tracker.MetricTracker", "`increment()` once per epoch"),
        ("peft.tuners.tuners_utils.BaseTunerLayer", "delete_adapter(name)"),
        ("peft.tuners.tuners_utils.BaseTuner", "delete_adapter(name)"),
        ("higher.optim.DifferentiableOptimizer", "innerloop_ctx"),
        ("torch.optim.lbfgs.LBFGS", "history_size"),
        ("transformers.cache_utils.Cache", "crop()"),
    ],
)
def test_the_fix_knows_the_library(name: str, fix: str) -> None:
    assert fix in mechanism_of(held(classes=("train.Mine", name))).fix
    assert fix not in mechanism_of(held(classes=("train.Mine",))).fix


def test_what_a_library_lengthens_has_the_librarys_fix() -> None:
    cache = ("transformers.cache_utils.DynamicCache", "transformers.cache_utils.Cache")
    longer = a_holder(LOSSES, lengthens=True)
    said = mechanism_of(replace(longer, detail=GroupDetail(classes=list(cache))))
    assert said.mechanism.startswith("losses gets longer: a cache of keys and values")
    assert "make a new cache for each sequence" in said.fix
    assert "as torch.cat does" in mechanism_of(longer).mechanism


def test_many_caches_that_are_kept_are_kept_by_the_program() -> None:
    each_its_own = a_holder(LOSSES, holders_multiply=True)
    classes = ["transformers.cache_utils.Cache"]
    said = mechanism_of(replace(each_its_own, detail=GroupDetail(classes=classes)))
    assert "crop()" not in said.fix and "clear losses" in said.fix
    tracker = GroupDetail(classes=["torchmetrics.wrappers.tracker.MetricTracker"])  # makes new ones itself
    assert "increment()" in mechanism_of(replace(each_its_own, detail=tracker)).fix


def test_of_a_graph_that_a_backward_went_through_only_nodes_are_alive() -> None:
    carried = held(LOSSES[:-1])
    assert "saved activations stay alive" in mechanism_of(carried).mechanism
    ran = replace(carried, detail=msgspec.structs.replace(carried.detail, backward_ran=True))
    assert "nodes stay alive" in mechanism_of(ran).mechanism


def test_an_array_that_is_lengthened_is_joined_once_instead() -> None:
    longer = a_holder(LOSSES[:-1], owner="", lengthens=True, ordinary=True)
    said = mechanism_of(longer)
    assert said.mechanism.startswith("losses is replaced by a longer one at every step (as numpy.concatenate")
    assert "joined once" in said.fix


def test_a_cache_that_carries_its_graph_though_no_backward_runs_needs_no_grad() -> None:
    cache = ("transformers.cache_utils.Cache",)
    assert "torch.no_grad()" in mechanism_of(held(classes=cache, gradients=False, entries_grow=False)).fix
    assert "crop()" in mechanism_of(held(classes=cache, gradients=False, entries_grow=True)).fix


def test_a_generator_is_to_be_closed_where_generators_pile_up() -> None:
    in_generator = (PathSegment(SegmentKind.GENERATOR, "stream"), *LOSSES[1:])
    piles_up = a_holder(in_generator, holders_multiply=True)
    assert "close()" in mechanism_of(piles_up).fix
    assert "close()" not in mechanism_of(replace(piles_up, holders_multiply=False)).fix


def test_a_program_without_steps_is_not_told_of_steps() -> None:
    longer = a_holder(LOSSES, lengthens=True, every="second")
    assert "by a longer one all the time" in mechanism_of(longer).mechanism


def test_fixed_entries_are_carried_and_growing_ones_kept() -> None:
    assert "is carried" not in mechanism_of(held(entries_grow=True)).mechanism
    assert "is carried" in mechanism_of(held(LOSSES[:-1])).mechanism
    assert "is carried" not in mechanism_of(held(LOSSES[:-1], entries_grow=True)).mechanism


def test_what_a_loop_runs_over_is_a_container_like_any_other() -> None:
    loader = PathSegment(SegmentKind.UNSEEN, "LoaderIterator")
    cache = tuple(PathSegment(SegmentKind.ATTRIBUTE, name) for name in ("dataset", "cache"))
    item = PathSegment(SegmentKind.ITEM, "*")
    paths = [(loader, *cache, item), (loader, item)]
    said = [mechanism_of(a_holder(path, owner="")) for path in paths]
    assert "dataset.cache gets new tensors" in said[0].mechanism and "clear cache" in said[0].fix
    assert "no variable of the program leads there" in said[1].mechanism and "unregister" in said[1].fix


@pytest.mark.parametrize(
    "part",
    [
        (PathSegment(SegmentKind.PARTIAL, "describe"), PathSegment(SegmentKind.ITEM, "0")),
        (PathSegment(SegmentKind.CLOSURE, "report"), PathSegment(SegmentKind.VARIABLE, "batch")),
    ],
)
def test_of_functions_that_keep_tensors_the_list_is_to_be_cleared(part: HolderPath) -> None:
    path = (*items_of("main", "callbacks"), *part)
    said = mechanism_of(a_holder(path, owner="", entries_grow=True))
    assert said.mechanism == "callbacks gets new tensors and is never cleared"
    assert "clear callbacks when" in said.fix


@pytest.mark.parametrize(("multiply", "container"), [(True, "snapshots"), (False, "snapshots[*]")])
def test_what_gets_a_new_dict_at_each_step_is_to_be_cleared_itself(multiply: bool, container: str) -> None:
    dicts = (*items_of("main", "snapshots"), PathSegment(SegmentKind.ITEM, "*"))
    said = mechanism_of(a_holder(dicts, owner="", holders_multiply=multiply))
    assert f"{container} gets new tensors" in said.mechanism
    assert f"clear {container} when" in said.fix


@pytest.mark.parametrize(("above", "container"), [(1, "saves"), (0, "saves[*].states")])
def test_of_containers_in_containers_the_one_that_gets_more_is_to_be_cleared(
    above: int, container: str
) -> None:
    """Each save has as many states as the one before."""
    states = (
        *items_of("main", "saves"), PathSegment(SegmentKind.ATTRIBUTE, "states"),
        PathSegment(SegmentKind.ITEM, "*"), PathSegment(SegmentKind.ITEM, "'mean'"),
    )  # fmt: skip
    said = mechanism_of(a_holder(states, owner="", holders_multiply=True, above=above))
    assert f"clear {container} when" in said.fix


def test_what_only_native_code_holds_is_no_variable() -> None:
    native = (PathSegment(SegmentKind.NATIVE),)
    said = mechanism_of(held(native))
    assert "nothing in Python refers" in said.mechanism and "C++ = " not in said.fix


def test_the_fix_names_the_entry_of_a_dict() -> None:
    logits = (*LOSSES, PathSegment(SegmentKind.ITEM, "'logits'"))
    said = mechanism_of(held(logits, stored_value="{'logits': logits}", entries_grow=True))
    assert "`logits.detach()` instead of the tensor itself in losses" in said.fix


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("loss", "`loss.detach()` (or `loss.item()`)"),
        ("out.loss", "`out.loss.detach()` (or"),
        ("model(x)", "`model(x).detach()` instead"),
        ("a + b", "`(a + b).detach()` instead"),
        ("[loss]", "`loss.detach()` (or `loss.item()`)"),
        ("loss.detach() if detach else loss", "`loss.detach()` (or `loss.item()`)"),
        ("w1 if w2", "`(w1 if w2).detach()` instead"),  # redacted
        (None, "`loss.detach()` (or `loss.item()`)"),
    ],
)
def test_the_fix_names_what_the_program_stores(value: str | None, kept: str) -> None:
    assert kept in mechanism_of(held(stored_value=value)).fix


PACKED = """
import torch
from torch.autograd.graph import saved_tensors_hooks

def run():
    with saved_tensors_hooks({pack}, lambda x: x):
        torch.ones(1000, requires_grad=True).exp()

run()
"""
LOOK = """
import sys
sys.path.insert(0, {folder!r})
import train
from memtriage.account.census import Look
with Look() as view:
    keys = [group.key for group in view.census().groups if group.nbytes >= 4000]
    found = view.details(keys, lambda obj: None, named=lambda trace: str(trace[0][1]))
    packed = [detail for detail in found.values() if detail.packs_itself]
    lines = [detail.stored_at for detail in packed]
    print(len(packed), *lines, *(len(detail.stored_value) for detail in packed))
"""


def test_a_pack_hook_that_returns_its_tensor_is_found(tmp_path: Path) -> None:
    look = LOOK.format(folder=str(tmp_path))
    (tmp_path / "train.py").write_text(PACKED.format(pack="lambda x: x"))
    assert printed_by(look) == [1, 6, len("lambda x: x")]
    (tmp_path / "train.py").write_text(PACKED.format(pack="lambda x: x.detach()"))
    assert printed_by(look) == [0]


def test_a_pack_hook_that_returns_its_tensor_is_named() -> None:
    native = (PathSegment(SegmentKind.NATIVE, "Tensor"),)
    said = mechanism_of(
        held(native, packs_itself=True, stored_at="a.py:6 in run", stored_value="lambda x: x")
    )
    assert "the pack hook `lambda x: x` (a.py:6 in run)" in said.mechanism
    assert "`x.detach().clone()`" in said.fix


def test_the_line_that_stores_is_told(findings: dict[str, list[Finding]]) -> None:
    cases = ("actions", "losses", "hook", "hook object", "default argument", "cache", "carried")
    for case in (*cases, "context variable"):
        assert any(finding.stored_at is not None for finding in findings[case]), case
    assert all(finding.stored_at is None for finding in findings["C++ only"])
