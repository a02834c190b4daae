"""Leaks of one cause become one; those of several causes stay apart."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.causes import SPEAKS_FOR_ALL, common_holder, one_a_cause
from memtriage.diagnose.growth.attribution import Rise
from memtriage.diagnose.growth.estimate import Growth
from memtriage.diagnose.growth.facts import Counted, Leak
from memtriage.diagnose.held import Held
from memtriage.model.census import CutSeen
from memtriage.model.paths import HolderPath, PathSegment, SegmentKind, anchor_of, in_words
from support.judged import a_holder, a_leak
from support.paths import attribute, graph, item, items_of, local, of_module


def leak(path: HolderPath, rate: int = 1000, **facts: object) -> Leak:
    return a_leak(path, rate, **facts)


def holder(found: Leak) -> str:
    assert found.path is not None
    return in_words(found.path)


def held(path: HolderPath, **facts: object) -> Leak:
    return leak(path, cause=a_holder(path, **facts))


def lora(place: str, part: str) -> HolderPath:
    h = (*local("main", "model"), *attribute("base", "h"), item("*"))
    return (*h, *attribute(*place.split("."), part, "adapter_*", "weight"))


PARAMS = of_module("train", "params")
X = local("main", "x")
TENSOR = (PathSegment(SegmentKind.NATIVE, "Tensor"),)
NODES = (PathSegment(SegmentKind.NATIVE),)
GRAD = PathSegment(SegmentKind.GRADIENT, "grad")
GARBAGE = (PathSegment(SegmentKind.GARBAGE_CYCLE, "Fold"),)
EPISODES = (*local("main", "buffer"), *attribute("episodes"), item("*"))

EXCEPTION = (*X, PathSegment(SegmentKind.TRACEBACK, "__traceback__"))

ONE_CAUSE: dict[str, tuple[list[HolderPath], str]] = {
    "functions that an exception passed": (
        [(*EXCEPTION, *local("load", "batch")), (*EXCEPTION, *local("read", "rows"))],
        "frame main(): x.__traceback__",
    ),
    "entries of a dict": (
        [(*PARAMS, item("'0.bias'")), (*PARAMS, item("'0.weight'")), (*PARAMS, item("'2.bias'"))],
        "train.params[*]",
    ),
    "a dict of lists": (
        [(*X, item("'loss'"), item("*")), (*X, item("'accuracy'"), item("*"))],
        "frame main(): x[*][*]",
    ),
    "a variable and its items": ([PARAMS, (*PARAMS, item("*"))], "train.params[*]"),
    "adapters in many modules": (
        [lora("attn.c_attn", "lora_A"), lora("attn.c_attn", "lora_B"), lora("mlp.c_proj", "lora_A")],
        "frame main(): model.base.h[*].*.c_*.lora_*.adapter_*.weight",
    ),
    "adapters and their gradients": (
        [lora("attn.c_attn", "lora_A"), (*lora("mlp.c_proj", "lora_B"), GRAD)],
        "frame main(): model.base.h[*].*.c_*.lora_*.adapter_*.weight.*",
    ),
    "adapters at different depths": (
        [
            (*local("main", "model"), *attribute("embed", "lora_A", "adapter_*", "weight")),
            (*local("main", "model"), *attribute("head", "proj", "lora_A", "adapter_*", "weight")),
        ],
        "frame main(): model.*.lora_A.adapter_*.weight",
    ),
    "parts of entries": (
        [(*EPISODES, item("'obs'"), item("*")), (*EPISODES, item("'actions'"), item("*"))],
        "frame main(): buffer.episodes[*][*][*]",
    ),
    "attributes of entries": (
        [(*EPISODES, *attribute("obs")), (*EPISODES, *attribute("reward"))],
        "frame main(): buffer.episodes[*].*",
    ),
    "a leaf and its gradient": ([X, (*X, GRAD)], "frame main(): x.grad"),
    "a cycle through C++": ([(*TENSOR, GRAD), TENSOR], "C++ -> Tensor.grad"),
    "nodes and tensors of a cycle": ([NODES, TENSOR], "C++"),
    "parts of a garbage cycle": (
        [(*GARBAGE, *attribute("net", "weight")), (*GARBAGE, *attribute("op", "state"), item("*"))],
        "garbage cycle of Fold",
    ),
    "a garbage cycle and a part of it": ([(*GARBAGE, *attribute("net")), GARBAGE], "garbage cycle of Fold"),
    "a cache": (
        [(PathSegment(SegmentKind.LRU_CACHE, "f"), item("*")), (PathSegment(SegmentKind.LRU_CACHE, "f"),)],
        "functools.lru_cache f[*]",
    ),
}
TWO_CAUSES: dict[str, tuple[HolderPath, HolderPath]] = {
    "two variables": (items_of("main", "losses"), items_of("main", "outputs")),
    "two frames": (items_of("main", "losses"), items_of("train", "losses")),
    "two attributes": ((*X, *attribute("losses"), item("*")), (*X, *attribute("outputs"), item("*"))),
    "a variable and C++": (X, TENSOR),
    "garbage cycles of two classes": (GARBAGE, (PathSegment(SegmentKind.GARBAGE_CYCLE, "Node"),)),
    "two functions' caches": (
        (PathSegment(SegmentKind.LRU_CACHE, "f"),),
        (PathSegment(SegmentKind.LRU_CACHE, "g"),),
    ),
    "two modules": (of_module("train", "seen"), of_module("data", "seen")),
    "two classes": tuple((PathSegment(SegmentKind.CLASS, f"m.{n}"), *attribute("all")) for n in "AB"),
}  # type: ignore[assignment]


@pytest.mark.parametrize(("paths", "common"), ONE_CAUSE.values(), ids=ONE_CAUSE)
def test_one_cause_is_one_leak(paths: list[HolderPath], common: str) -> None:
    (found,) = one_a_cause([leak(path) for path in paths])
    assert (holder(found), found.rate, found.nbytes) == (common, 1000 * len(paths), 10_000 * len(paths))
    assert one_a_cause([found]) == [found]


@pytest.mark.parametrize(("one", "other"), TWO_CAUSES.values(), ids=TWO_CAUSES)
def test_two_causes_are_two_leaks(one: HolderPath, other: HolderPath) -> None:
    leaks = [leak(one, 3), leak(other, 2)]
    assert one_a_cause(leaks) == leaks
    assert common_holder(one, other) is common_holder(other, one) is None


def test_the_graph_behind_a_holder_is_no_part_of_the_holder() -> None:
    paths = [(*PARAMS, item(f"'{n}'"), *graph("SubBackward0", saved="other")) for n in "ab"]
    (found,) = one_a_cause([leak(path) for path in paths])
    assert holder(found) == "train.params[*] -> grad_fn SubBackward0 -> saved other"
    assert isinstance(found.cause, Held)
    assert found.cause.path == found.path and in_words(found.cause.anchor) == "train.params[*]"


def test_the_cause_of_several_has_the_facts_about_its_parts() -> None:
    (found,) = one_a_cause([held((*PARAMS, item(f"'{n}'")), shared=True) for n in "ab"])
    assert isinstance(found.cause, Held) and found.cause.detail.shared


METRIC = ("torchmetrics.metric.Metric",)


def test_holders_of_one_graph_are_one_cause() -> None:
    """Detaching the tensors of one releases little, of both all."""
    losses, norms = (*of_module("train", "losses"), item("*")), (*of_module("train", "norms"), item("*"))
    detach = CutSeen(cut="detach", at=losses, together=[norms], releases=90, of=100)
    own = CutSeen(cut="detach", at=norms, releases=10, of=10)
    (found,) = one_a_cause([held(norms, cuts=(own,)), held(losses, cuts=(detach,), rate=1.0)])
    assert found.rate == 2000 and isinstance(found.cause, Held)
    assert {holder(found), *map(in_words, found.also_held_by)} == {"train.losses[*]", "train.norms[*]"}
    (joined,) = found.cause.detail.cuts
    assert (joined.releases, joined.of, found.cause.rate) == (100, 110, 2000)
    apart = [held(norms, cuts=(own,)), held(losses, cuts=(msgspec.structs.replace(detach, together=[]),))]
    assert len(one_a_cause(apart)) == 2


@pytest.mark.parametrize(
    ("classes", "kept"),
    [
        ((METRIC, METRIC), "*"),
        ((METRIC, ()), "preds"),
        ((METRIC, ("queue.Queue",)), "preds"),
        (((), ()), "preds"),
    ],
)
def test_what_one_part_of_a_library_keeps_is_one_cause(
    classes: tuple[tuple[str, ...], tuple[str, ...]], kept: str
) -> None:
    paths = [(*X, *attribute(name), item("*")) for name in ("preds", "target")]
    leaks = one_a_cause([held(path, classes=of) for path, of in zip(paths, classes, strict=True)])
    assert len(leaks) == (1 if kept == "*" else 2)
    assert holder(leaks[0]) == f"frame main(): x.{kept}[*]"


def test_two_variables_of_one_library_are_two_causes() -> None:
    paths = [(*local("main", name), *attribute("preds"), item("*")) for name in ("train", "valid")]
    assert len(one_a_cause([held(path, classes=METRIC) for path in paths])) == 2


def test_a_part_that_has_most_of_it_names_the_whole() -> None:
    actions = (*EPISODES, item("'actions'"), item("*"))
    others = (*EPISODES, item("'obs'"), item("*"))
    (found,) = one_a_cause([leak(others, 100), leak(actions, 900, stored_at="a.py:3 in run")])
    assert (found.path, found.rate, found.stored_at) == (actions, 1000, "a.py:3 in run")
    assert isinstance(found.cause, Held) and found.cause.path == actions
    assert [part.rate for part in found.parts] == [900, 100]


def test_sites_and_certainty_come_from_the_parts() -> None:
    paths = [(*PARAMS, item(f"'{n}'")) for n in "abc"]
    parts = [
        leak(paths[0], 50, certainty="suspected"),
        leak(paths[1], 40, certainty="proven", allocated_at="a.py:1 in f"),
        leak(paths[2], 30, certainty="suspected", allocated_at="b.py:1 in f", stored_at="b.py:2 in f"),
    ]
    (found,) = one_a_cause(parts)
    assert (found.certainty, found.allocated_at, found.stored_at) == ("proven", "a.py:1 in f", "b.py:2 in f")
    assert found.parts == tuple(parts)


def test_one_place_on_two_scales_is_one_growth() -> None:
    within = a_leak(X, rates={"micro-batch": 70}, allocated_at="a.py:1 in f")
    over_run = leak(X, 300, rates={"step": 300, "micro-batch": 75})
    (found,) = one_a_cause([within, over_run])
    assert (found.rates, found.nbytes) == ({"step": 300, "micro-batch": 70}, 3000)
    assert found.allocated_at == "a.py:1 in f"
    assert one_a_cause([over_run, within]) == [found]


def test_devices_stay_apart_except_host_memory_of_cpu_tensors() -> None:
    rise = Rise(points=((1, 0), (2, 9)), counter="cpu", series=())
    gpu, cpu, host = (
        leak(X, rate, device=device, shown_by=rise)
        for device, rate in {"cuda:0": 5, "cpu": 4, "host": 3}.items()
    )
    leaks = one_a_cause([host, cpu, gpu])
    assert [(found.device, found.rate) for found in leaks] == [("cpu", 7), ("cuda:0", 5)]
    assert [leak.device for leak in one_a_cause([host])] == ["host"]


def test_kinds_and_growth_without_a_path_stay_apart() -> None:
    garbage, native = leak(X, 3, kind="garbage_cycle"), a_leak(rate=2)
    assert one_a_cause([native, garbage, leak(X, 4), native]) == [leak(X, 4), garbage, native, native]


def test_a_part_with_just_less_than_the_share_that_names_the_whole_does_not() -> None:
    share = round(100 * SPEAKS_FOR_ALL)
    for most, common in ((share, "train.params['a']"), (share - 1, "train.params[*]")):
        parts = [leak((*PARAMS, item("'a'")), most), leak((*PARAMS, item("'b'")), 100 - most)]
        assert [holder(found) for found in one_a_cause(parts)] == [common]


def test_what_entries_keep_in_native_memory_is_part_of_their_leak() -> None:
    entries = leak(X, 30, stored_at="a.py:2 in f")
    native = leak(
        X, 70, device="cuda:0", nbytes=500, certainty="suspected", allocated_at="a.py:1 in f",
        shown_by=Counted("cuda:0", Growth("growing", 70, 60, 80), 0),
    )  # fmt: skip
    (whole,) = one_a_cause([entries, native])
    assert (whole.device, whole.rates, whole.nbytes) == ("cuda:0", {"step": 100}, 800)
    assert (whole.certainty, whole.allocated_at, whole.stored_at) == ("proven", "a.py:1 in f", "a.py:2 in f")
    assert whole.parts == (native, entries)
    doubtful = replace(entries, certainty="suspected")
    assert one_a_cause([doubtful, native])[0].certainty == "suspected"
    assert one_a_cause([doubtful, replace(native, certainty="proven")])[0].certainty == "proven"


PLACES = st.builds(
    PathSegment, st.sampled_from([SegmentKind.ITEM, SegmentKind.ATTRIBUTE]), st.sampled_from("ab*")
)
PATHS = st.lists(PLACES, max_size=4).map(lambda places: (*X, *places))


@given(st.lists(st.tuples(PATHS, st.integers(1, 100)), max_size=6))
def test_nothing_is_lost_and_nothing_counts_twice(parts: list[tuple[HolderPath, int]]) -> None:
    once = dict(parts)
    leaks = one_a_cause([leak(path, rate) for path, rate in once.items()])
    assert sum(found.rate for found in leaks) == sum(once.values())
    assert len(leaks) <= len(once)


def test_an_anchor_ends_before_the_graph() -> None:
    assert anchor_of((*X, *graph("AddBackward0", saved="self"))) == X
    assert anchor_of(X) == X


def test_a_place_that_differs_keeps_its_kind() -> None:
    hooks = [(*PARAMS, item("*"), PathSegment(SegmentKind.HOOKS, name), item("*")) for name in ("aa", "bb")]
    joined = common_holder(*hooks)
    assert joined is not None and joined[-2] == PathSegment(SegmentKind.HOOKS, "*")


def test_names_keep_their_common_beginning() -> None:
    for names, common in ((("actions", "acts"), "act*"), (("obs", "reward"), "*")):
        parts = [leak((*EPISODES, *attribute(name))) for name in names]
        assert holder(one_a_cause(parts)[0]) == f"frame main(): buffer.episodes[*].{common}"


def test_entries_under_two_numbered_names_are_two_causes() -> None:
    one, other = ((*X, *attribute(name, "weight")) for name in ("adapter_*", "head_*"))
    assert common_holder(one, other) is None
    assert common_holder(one, (*X, *attribute("head", "weight"))) is None


def test_host_memory_that_grows_fastest_is_still_of_its_holders_device() -> None:
    (found,) = one_a_cause([leak(X, 5, device="host"), leak(X, 4, device="cpu")])
    assert (found.device, found.rate) == ("cpu", 9)


def test_the_only_line_that_stores_a_place_of_two_scales_is_its_line() -> None:
    within = a_leak(X, rates={"micro-batch": 70}, stored_at="a.py:2")
    (found,) = one_a_cause([within, leak(X, 300)])
    assert found.stored_at == "a.py:2"


def test_entries_that_two_containers_have_count_once() -> None:
    by_time, by_name = items_of("main", "by_time"), items_of("main", "by_name")
    both = CutSeen(cut="bound", at=by_time, together=[by_name], releases=100, of=100)
    (found,) = one_a_cause(
        [held(by_time, ordinary=True, cuts=(both,)), held(by_name, ordinary=True)],
    )
    assert (found.path, found.rate, found.also_held_by) == (by_time, 1000, (by_name,))
    (tensors,) = one_a_cause([held(by_time, cuts=(both,)), held(by_name)])
    assert tensors.rate == 2000  # each has its own
