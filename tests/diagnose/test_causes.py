"""Growing findings of one cause become one; those of several causes stay apart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.causes import POLICY, common_holder, one_a_cause, with_native_part
from memtriage.diagnose.mechanisms import Held
from memtriage.model.findings import Finding, Projection
from memtriage.model.paths import HolderPath, PathSegment, SegmentKind, anchor_of, in_words
from support.paths import attribute, graph, item, items_of, local, of_module


def leak(path: HolderPath, rate: int | None = 1000, **facts: object) -> Finding:
    facts = {"device": "cpu", "bytes": 10 * (rate or 0), "mechanism": "before", "fix": "before", **facts}
    return Finding(kind="leak", bytes_per_step=rate, holder_path=path, **facts)  # type: ignore[arg-type]


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

ONE_CAUSE: dict[str, tuple[list[HolderPath], str]] = {
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


@pytest.mark.parametrize(("paths", "holder"), ONE_CAUSE.values(), ids=ONE_CAUSE)
def test_one_cause_is_one_finding(paths: list[HolderPath], holder: str) -> None:
    leaks = one_a_cause([leak(path) for path in paths])
    assert [(finding.holder, finding.bytes_per_step, finding.bytes) for finding in leaks] == [
        (holder, 1000 * len(paths), 10_000 * len(paths))
    ]
    assert leaks[0].holder_path is not None and in_words(leaks[0].holder_path) == holder
    assert leaks == one_a_cause(leaks)


@pytest.mark.parametrize(("one", "other"), TWO_CAUSES.values(), ids=TWO_CAUSES)
def test_two_causes_are_two_findings(one: HolderPath, other: HolderPath) -> None:
    findings = [leak(one, 3), leak(other, 2)]
    assert one_a_cause(findings) == findings
    assert common_holder(one, other) is common_holder(other, one) is None


def test_the_graph_behind_a_holder_is_no_part_of_the_holder() -> None:
    paths = [(*PARAMS, item(f"'{n}'"), *graph("SubBackward0", saved="other")) for n in "ab"]
    (found,) = one_a_cause([leak(path) for path in paths])
    assert found.holder == "train.params[*] -> grad_fn SubBackward0 -> saved other"
    assert "'a'" not in f"{found.mechanism}{found.fix}" and "before" not in (found.fix or "")


def test_folded_mechanism_uses_facts_about_its_parts() -> None:
    paths = [(*PARAMS, item(f"'{n}'")) for n in "ab"]
    held = {path: Held(path, path, attached=False, owner="variable", shared=True) for path in paths}
    (found,) = one_a_cause([leak(path) for path in paths], held)
    assert found.mechanism is not None and "shared memory" in found.mechanism


METRIC = ("torchmetrics.metric.Metric",)


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
    held = {
        path: Held(path, path, attached=False, owner="variable", classes=of)
        for path, of in zip(paths, classes, strict=True)
    }
    leaks = one_a_cause([leak(path) for path in paths], held)
    assert len(leaks) == (1 if kept == "*" else 2)
    assert leaks[0].holder == f"frame main(): x.{kept}[*]"


def test_two_variables_of_one_library_are_two_causes() -> None:
    paths = [(*local("main", name), *attribute("preds"), item("*")) for name in ("train", "valid")]
    held = {path: Held(path, path, attached=False, owner="variable", classes=METRIC) for path in paths}
    assert len(one_a_cause([leak(path) for path in paths], held)) == 2


def test_a_part_that_has_most_of_it_names_the_whole() -> None:
    actions = (*EPISODES, item("'actions'"), item("*"))
    others = (*EPISODES, item("'obs'"), item("*"))
    (found,) = one_a_cause([leak(others, 100), leak(actions, 900, stored_at="a.py:3 in run")])
    assert (found.holder_path, found.bytes_per_step, found.fix) == (actions, 1000, "before")
    assert found.stored_at == "a.py:3 in run"
    assert found.evidence[0].startswith("the sum of: 900 B per step at")


def test_sites_and_certainty_come_from_the_parts() -> None:
    paths = [(*PARAMS, item(f"'{n}'")) for n in "abc"]
    parts = [
        leak(paths[0], 50, certainty="suspected", evidence=["one"]),
        leak(paths[1], 40, certainty="proven", allocated_at="a.py:1 in f", evidence=["two", "three"]),
        leak(paths[2], 30, certainty="suspected", allocated_at="b.py:1 in f", stored_at="b.py:2 in f"),
    ]
    (found,) = one_a_cause(parts)
    assert (found.certainty, found.allocated_at, found.stored_at) == ("proven", "a.py:1 in f", "b.py:2 in f")
    assert found.evidence[0].startswith("the sum of: 40 B per step at train.params['b']; 50 B per step at")
    assert found.evidence[1:] == ["the first of these: two", "the first of these: three"]
    assert parts[0].evidence == ["one"]


def test_one_place_on_two_scales_is_one_growth() -> None:
    within = Finding(
        kind="leak", device="cpu", bytes_per_microbatch=70, holder_path=X, allocated_at="a.py:1 in f"
    )
    (found,) = one_a_cause([within, leak(X, 300, bytes_per_microbatch=75)])
    assert (found.bytes_per_step, found.bytes_per_microbatch, found.bytes) == (300, 70, 3000)
    assert found.allocated_at == "a.py:1 in f"
    assert one_a_cause([leak(X, 300, bytes_per_microbatch=75), within]) == [found]


def test_devices_stay_apart_except_host_memory_of_cpu_tensors() -> None:
    gpu, cpu, host = (
        leak(X, rate, device=device) for device, rate in {"cuda:0": 5, "cpu": 4, "host": 3}.items()
    )
    leaks = one_a_cause([host, cpu, gpu])
    assert [(finding.device, finding.bytes_per_step) for finding in leaks] == [("cpu", 7), ("cuda:0", 5)]
    assert [leak.device for leak in one_a_cause([host])] == ["host"]


def test_ranks_kinds_and_findings_without_growth_stay_apart() -> None:
    other_rank, garbage = leak(X, 3, rank=1), msgspec.structs.replace(leak(X, 2), kind="garbage_cycle")
    died = Finding(kind="out_of_memory", device="cpu", holder_path=X)
    assert one_a_cause([died, garbage, other_rank, leak(X, 4)]) == [leak(X, 4), other_rank, garbage, died]


def test_growth_without_a_path_is_told_by_its_words() -> None:
    cpp = Finding(kind="leak", device="host", bytes_per_step=5, holder="C++ only")
    assert one_a_cause([cpp, leak(X, 4)]) == [cpp, leak(X, 4)]


def test_memory_is_full_sooner_if_all_parts_grow() -> None:
    def part(name: str, step: int) -> Finding:
        ends = Projection(device="cpu", limit=1000, step=step)
        return leak((*PARAMS, item(name)), 10, step=100, projection=ends, evidence=[str(ends)])

    (found,) = one_a_cause([part("'a'", 300), part("'b'", 300)])
    assert found.projection == Projection(device="cpu", limit=1000, step=200)
    assert [line for line in found.evidence if "is full" in line] == [str(found.projection)]


def test_within_a_step_memory_is_full_sooner_if_all_parts_grow() -> None:
    def part(name: str, microbatches: int) -> Finding:
        ends = Projection(device="cpu", limit=1000, microbatches=microbatches)
        return leak((*PARAMS, item(name)), None, bytes_per_microbatch=10, projection=ends)

    (found,) = one_a_cause([part("'a'", 300), part("'b'", 150)])
    assert found.projection == Projection(device="cpu", limit=1000, microbatches=100)
    assert found.evidence[0].startswith("the sum of: 10 B per micro-batch at")


def test_an_end_that_is_past_says_nothing_of_the_rest() -> None:
    ends = [Projection(device="cpu", limit=1000, step=step) for step in (100, 300)]
    parts = [leak((*PARAMS, item(f"'{end.step}'")), 10, step=100, projection=end) for end in ends]
    (found,) = one_a_cause(parts)
    assert found.projection == ends[1]
    parts[1].step = 300
    (found,) = one_a_cause(parts)
    assert found.projection is None


def test_evidence_lists_the_fastest_parts_and_counts_the_others() -> None:
    def per_second(count: int) -> str:
        parts = [leak((*PARAMS, item(f"'{n}'")), None, bytes_per_second=9 - n) for n in range(count)]
        (found,) = one_a_cause(parts)
        assert (found.bytes_per_step, found.bytes_per_second) == (None, sum(9 - n for n in range(count)))
        return found.evidence[0]

    first = "; ".join(f"{9 - n} B per second at train.params['{n}']" for n in range(4))
    assert per_second(4) == f"the sum of: {first}"
    assert per_second(6) == f"the sum of: {first}; 2 more"


def test_a_part_with_just_less_than_the_share_that_names_the_whole_does_not() -> None:
    share = round(100 * POLICY.speaks_for_all)
    for most, holder in ((share, "train.params['a']"), (share - 1, "train.params[*]")):
        parts = [leak((*PARAMS, item("'a'")), most), leak((*PARAMS, item("'b'")), 100 - most)]
        assert [found.holder for found in one_a_cause(parts)] == [holder]


def test_what_entries_keep_in_native_memory_is_part_of_their_leak() -> None:
    entries = leak(X, 30, certainty="proven", stored_at="a.py:2 in f", evidence=["entries"], step=0)
    entries.projection = Projection(device="cpu", limit=1000, step=300)
    native = Finding(kind="leak", device="host", bytes_per_step=70, bytes=500, certainty="suspected", step=0)
    native.evidence, native.allocated_at = ["counter"], "a.py:1 in f"
    native.projection = Projection(device="host", limit=1000, step=150)
    whole = with_native_part(entries, native)
    assert (whole.device, whole.bytes_per_step, whole.bytes) == ("host", 100, 800)
    assert (whole.bytes_per_microbatch, whole.bytes_per_second) == (None, None)
    assert (whole.certainty, whole.allocated_at, whole.stored_at) == ("proven", "a.py:1 in f", "a.py:2 in f")
    assert whole.evidence == ["entries", "counter"]
    assert whole.projection is not None and whole.projection.step == 100
    entries.certainty = "suspected"
    assert with_native_part(entries, native).certainty == "suspected"
    native.certainty = "proven"
    assert with_native_part(entries, native).certainty == "proven"


PLACES = st.builds(
    PathSegment, st.sampled_from([SegmentKind.ITEM, SegmentKind.ATTRIBUTE]), st.sampled_from("ab*")
)
PATHS = st.lists(PLACES, max_size=4).map(lambda places: (*X, *places))


@given(st.lists(st.tuples(PATHS, st.integers(1, 100)), max_size=6))
def test_nothing_is_lost_and_nothing_counts_twice(parts: list[tuple[HolderPath, int]]) -> None:
    once = dict(parts)
    findings = [leak(path, rate) for path, rate in once.items()]
    leaks = one_a_cause(findings)
    assert sum(finding.bytes_per_step or 0 for finding in leaks) == sum(once.values())
    assert len(leaks) <= len(findings)


def test_an_anchor_ends_before_the_graph() -> None:
    assert anchor_of((*X, *graph("AddBackward0", saved="self"))) == X
    assert anchor_of(X) == X


def test_findings_without_a_path_are_one_cause_by_their_holder() -> None:
    nodes = [
        Finding(kind="leak", device=device, holder=holder, bytes_per_step=9, bytes=90)
        for device, holder in (
            ("cpu", "native Tensor"),
            ("cpu", "native Tensor"),
            ("cpu", "native Node"),
            ("cpu", None),
        )
    ]
    assert len(one_a_cause(nodes[:2])) == 1
    assert len(one_a_cause([nodes[0], nodes[2]])) == 2
    assert len(one_a_cause([nodes[3], nodes[3]])) == 2
    assert len(one_a_cause([nodes[0], msgspec.structs.replace(nodes[1], device="cuda:0")])) == 2


def test_a_place_that_differs_keeps_its_kind() -> None:
    hooks = [(*PARAMS, item("*"), PathSegment(SegmentKind.HOOKS, name), item("*")) for name in ("aa", "bb")]
    joined = common_holder(*hooks)
    assert joined is not None and joined[-2] == PathSegment(SegmentKind.HOOKS, "*")


def test_names_with_one_letter_in_common_are_any_name() -> None:
    parts = [(*EPISODES, *attribute(name)) for name in ("actions", "advantages")]
    assert one_a_cause([leak(path) for path in parts])[0].holder == "frame main(): buffer.episodes[*].*"
    parts = [(*EPISODES, *attribute(name)) for name in ("actions", "acts")]
    assert one_a_cause([leak(path) for path in parts])[0].holder == "frame main(): buffer.episodes[*].act*"


def test_entries_under_two_numbered_names_are_two_causes() -> None:
    one, other = ((*X, *attribute(name, "weight")) for name in ("adapter_*", "head_*"))
    assert common_holder(one, other) is None
    assert common_holder(one, (*X, *attribute("head", "weight"))) is None


def test_host_memory_that_grows_fastest_is_still_of_its_holders_device() -> None:
    (found,) = one_a_cause([leak(X, 5, device="host"), leak(X, 4, device="cpu")])
    assert (found.device, found.bytes_per_step) == ("cpu", 9)


def test_the_only_line_that_stores_a_place_of_two_scales_is_its_line() -> None:
    within = Finding(kind="leak", device="cpu", bytes_per_microbatch=70, holder_path=X, stored_at="a.py:2")
    (found,) = one_a_cause([within, leak(X, 300)])
    assert found.stored_at == "a.py:2"
