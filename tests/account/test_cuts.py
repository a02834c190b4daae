"""What cuts release: measured on the heap of programs that hold tensors in one way each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.census import CensusView
from memtriage.account.cuts import strongly_connected
from memtriage.account.native_sizes import SIZES
from memtriage.model.census import CutSeen
from memtriage.model.paths import in_words
from support.torch_state import shows_saved_tensors

pytest.importorskip("torch")
shown = shows_saved_tensors()

PROGRAM = """
import functools
import numpy as np
import torch
from torch import nn

weight = nn.Parameter(torch.ones(5000))

def loss():
    return (weight * torch.ones(5000)).exp().sum()

losses = [loss() for _ in range(4)]
both = [loss() for _ in range(4)]
first = [both[0]]

sums, means, peaks = [], [], []
for _ in range(4):
    common = (weight * torch.ones(5000)).exp()
    sums.append(common.sum())
    means.append(common.mean())
    peaks.append(common.amax())

views = [torch.ones(64, 500)[:1] for _ in range(4)]
numbers = [one for _ in range(4) for one in torch.ones(256)]  # views that together are their whole storage
whole = [torch.ones(500) for _ in range(4)]
arrays = [torch.ones(64, 500).numpy()[:1] for _ in range(4)]
seen = [torch.ones(64, 500)[:1] for _ in range(4)]
used = [[[seen[0]._base]]]

class Block(nn.Module):
    pass

def scale(block, factor):
    def hook(module, args):
        return args[0] * factor
    for part in block:
        part.register_forward_pre_hook(hook)

blocks = [Block(), Block()]
for _ in range(3):
    scale(blocks, torch.ones(5000))

class Strategy:
    pass

layers = [Block(), Block()]
for layer in layers:
    layer.norms = {}
for number in range(3):
    edges = torch.ones(5000)
    for layer in layers:
        layer.norms[number] = (edges, number)
del edges, layer

folds, steppers = [], []
for _ in range(3):
    stepper = Strategy()
    stepper.trained, stepper.state = [torch.ones(5000)], torch.ones(5000)
    folds.append(stepper.trained[0])
    steppers.append(stepper)
del stepper

@functools.lru_cache(maxsize=None)
def mask(number):
    return torch.ones(5000)
for number in range(3):
    mask(number)

errors = []
def failing():
    batch = torch.ones(5000)
    raise ValueError
for _ in range(3):
    try:
        failing()
    except ValueError as error:
        errors.append(error)

class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.cache = torch.ones(5000)
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        return gradient
elbos = [Keep.apply(weight).sum() for _ in range(3)]

class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.outputs = x * 1, x * 2  # the collector does not see a node with several outputs
        return ctx.outputs
    @staticmethod
    def backward(ctx, one, two):
        return one
Two.apply(weight)

def look_ahead():
    strategy, mean = Strategy(), weight * torch.ones(5000)
    strategy.cache = {"mean": mean}
    mean.grad_fn.register_hook(functools.partial(print, strategy))
look_ahead()

scans = [np.ones(4000) for _ in range(5)]
rows = [{"row": np.ones((64, 500))[:1]} for _ in range(5)]
texts = [bytes(5000) for _ in range(5)]
records = {number: {"name": "x" * 1000 + str(number), "log": []} for number in range(5)}
latest = records[0]
by_time = [np.ones(4000) for _ in range(5)]
by_name = dict(enumerate(by_time))
settings = {"scale": np.ones(4000)}
samples = [{"settings": settings, "value": bytes(3000)} for _ in range(5)]
received = [np.frombuffer(bytes(5000)) for _ in range(5)]
by_text = {("x" * 5000 + str(number),): None for number in range(5)}
wide = [[[] for _ in range(1000)] for _ in range(100)]
"""
DATA = ("scans", "rows", "texts", "records", "by_time", "by_name", "samples", "received", "by_text", "wide")


@pytest.fixture(scope="module")
def cuts(only_new_objects: None, gallery: Callable[..., Any]) -> Iterator[dict[str, dict[str, CutSeen]]]:
    """The cuts of each group of the program, and of its ordinary data, by the anchor and by the kind."""
    found: dict[str, dict[str, CutSeen]] = {}

    def ask(view: CensusView) -> None:
        keys = [group.key for group in view.census().groups if group.device == "cpu"]
        for (_, anchor), detail in view.details(keys, lambda _: None).items():
            found[in_words(anchor)] = {cut.cut: cut for cut in detail.cuts}

        at = {name: view.graph.index[id(train[name])] for name in DATA}
        of_data = view.cuts_of_data(at.values())
        found.update({name: {cut.cut: cut for cut in of_data[at[name]]} for name in DATA})

    train = gallery({}, PROGRAM)
    train.look(ask)
    yield found


FLOATS = 4 * 5000
OBJECT = 1000
"""More than a tensor object without data takes."""


def left(cut: CutSeen) -> int:
    return cut.of - cut.releases


@shown
def test_a_detached_loss_keeps_its_value(cuts: dict[str, dict[str, CutSeen]]) -> None:
    of_losses = cuts["train.losses[*]"]
    # `mul` saves its factor, `exp` its result.
    assert of_losses["detach"].releases > 4 * 2 * FLOATS
    assert 0 < left(of_losses["detach"]) < 4 * OBJECT
    assert left(of_losses["bound"]) == 0 and of_losses["bound"].kind == "list"
    assert "clone" not in of_losses


@shown
def test_entries_with_many_objects_stand_for_all(cuts: dict[str, dict[str, CutSeen]]) -> None:
    """More objects than are looked at: 100 lists of 1,000 lists of 56 bytes, each with a place of 8 bytes."""
    bound = cuts["wide"]["bound"]
    assert bound.releases == bound.of == pytest.approx(100 * 1000 * (8 + 56 + 16), rel=0.15)


@shown
def test_what_another_list_keeps_is_not_released(cuts: dict[str, dict[str, CutSeen]]) -> None:
    of_both = cuts["train.both[*]"]
    assert 3 * left(of_both["bound"]) == pytest.approx(of_both["bound"].releases, rel=0.01)


@shown
def test_three_lists_that_keep_one_graph_are_detached_together(
    cuts: dict[str, dict[str, CutSeen]],
) -> None:
    names = {f"train.{name}[*]" for name in ("sums", "means", "peaks")}
    largest = max(names, key=lambda name: cuts[name]["detach"].of)
    detached = cuts[largest]["detach"]
    assert set(map(in_words, detached.together)) == names - {largest}
    assert detached.of > 3 * FLOATS and left(detached) < 4 * OBJECT


def test_a_copy_keeps_the_bytes_of_the_view(cuts: dict[str, dict[str, CutSeen]]) -> None:
    copied = cuts["train.views[*]"]["clone"]
    assert 4 * 4 * 500 <= left(copied) < 4 * (4 * 500 + OBJECT)
    assert copied.of > 4 * 4 * 64 * 500
    assert "clone" not in cuts["train.whole[*]"]
    of_array = next(each["clone"] for anchor, each in cuts.items() if anchor.startswith("train.arrays"))
    assert left(of_array) < 4 * (4 * 500 + OBJECT)


def test_copies_that_need_as_much_as_their_views_release_nothing(
    cuts: dict[str, dict[str, CutSeen]],
) -> None:
    of_numbers = cuts["train.numbers[*]"]
    assert of_numbers["clone"].releases == 0
    assert of_numbers["bound"].releases > 4 * 256 * (SIZES.tensor + SIZES.wrapper)


def test_a_base_that_is_used_elsewhere_stays(cuts: dict[str, dict[str, CutSeen]]) -> None:
    copied = cuts["train.seen[*]"]["clone"]
    assert left(copied) > 4 * 64 * 500


def test_a_hook_of_two_modules_is_removed_from_both(cuts: dict[str, dict[str, CutSeen]]) -> None:
    of_hooks = next(each for anchor, each in cuts.items() if "_forward_pre_hooks" in anchor)
    assert of_hooks["remove"].releases == of_hooks["remove"].of > 3 * FLOATS


def test_what_several_layers_cache_is_released_by_all_of_them(cuts: dict[str, dict[str, CutSeen]]) -> None:
    (found,) = [found for name, found in cuts.items() if "norms" in name]
    assert "layers[*].norms[*]" in in_words(found["bound"].at)
    assert found["bound"].releases == found["bound"].of >= 3 * FLOATS


def test_caches_and_exceptions_are_cut_at_their_tables(cuts: dict[str, dict[str, CutSeen]]) -> None:
    for part, kind in (("lru_cache mask", "cache"), ("errors[*].__traceback__", "traceback")):
        of_part = next(each for anchor, each in cuts.items() if part in anchor)
        assert of_part[kind].releases == of_part[kind].of > 3 * FLOATS


@shown
def test_a_context_keeps_less_without_its_attribute(cuts: dict[str, dict[str, CutSeen]]) -> None:
    of_elbos = cuts["train.elbos[*]"]
    assert 3 * FLOATS < of_elbos["context"].releases < of_elbos["detach"].releases


@shown
def test_a_cycle_through_native_code_is_cut_at_any_of_its_references(
    cuts: dict[str, dict[str, CutSeen]],
) -> None:
    of_cycle = next(each for anchor, each in cuts.items() if anchor.startswith("C++") and "context" in each)
    assert of_cycle["context"].releases == of_cycle["context"].of > 2 * FLOATS


@shown
def test_a_hook_of_a_node_that_leads_to_its_tensor_is_a_cycle(cuts: dict[str, dict[str, CutSeen]]) -> None:
    of_cycle = next(each for anchor, each in cuts.items() if "functools.partial print" in anchor)
    assert of_cycle["detach"].of > 2 * FLOATS
    assert left(of_cycle["detach"]) == left(of_cycle["break"]) == 0


def test_what_two_containers_keep_is_released_by_bounding_both(cuts: dict[str, dict[str, CutSeen]]) -> None:
    of_both, of_one = cuts["train.folds[*]"]["bound"], cuts["train.steppers[*].state"]["bound"]
    assert of_both.of >= 3 * FLOATS and left(of_both) == left(of_one) == 0
    assert (list(map(in_words, of_both.together)), of_one.together) == (["train.steppers[*]"], [])


def test_data_in_a_container_is_released_with_its_entries(cuts: dict[str, dict[str, CutSeen]]) -> None:
    of_texts = ((name, 5 * 5000, "list") for name in ("texts", "received"))
    for name, least, kind in (("scans", 5 * 8 * 4000, "list"), *of_texts, ("by_text", 5 * 5000, "dict")):
        bound = cuts[name]["bound"]
        assert bound.of == bound.releases >= least and bound.kind == kind
        assert in_words(bound.at) == f"train.{name}[*]" and list(cuts[name]) == ["bound"]


def test_an_entry_that_a_variable_has_stays(cuts: dict[str, dict[str, CutSeen]]) -> None:
    bound = cuts["records"]["bound"]
    assert bound.of > 5 * 1000 and bound.kind == "dict"
    assert 4 * left(bound) == pytest.approx(bound.of, rel=0.01)


def test_entries_of_two_containers_are_released_by_both(cuts: dict[str, dict[str, CutSeen]]) -> None:
    for name, other in (("by_time", "by_name"), ("by_name", "by_time")):
        bound = cuts[name]["bound"]
        assert bound.releases == bound.of >= 5 * 8 * 4000
        assert list(map(in_words, bound.together)) == [f"train.{other}[*]"]


def test_what_all_entries_share_is_no_growth(cuts: dict[str, dict[str, CutSeen]]) -> None:
    assert 5 * 3000 < cuts["samples"]["bound"].of < 5 * (3000 + OBJECT)


def test_a_copy_of_a_row_releases_the_array(cuts: dict[str, dict[str, CutSeen]]) -> None:
    copied = cuts["rows"]["clone"]
    assert 5 * 8 * 500 <= left(copied) < 5 * (8 * 500 + OBJECT)
    assert copied.of > 5 * 8 * 64 * 500


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=10, max_size=10), st.integers(0, 9))
def test_nodes_that_reach_each_other_are_a_cycle(graph: list[list[int]], without: int) -> None:
    among = [node for node in range(10) if node != without]

    def reached(start: int) -> set[int]:
        queue = [start]
        for node in queue:
            queue += [after for after in graph[node] if after in among and after not in queue]
        return set(queue)

    reach = {node: reached(node) for node in among}
    cycles = {frozenset(n for n in reach[node] if node in reach[n]) for node in among}
    found = strongly_connected(graph, among, {})
    assert {frozenset(each) for each in found} == {each for each in cycles if len(each) > 1}
    assert sum(map(len, found)) == len({node for each in found for node in each})
