"""The judgement: which of the things that grew are leaks, at what rate, and until when they fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth import Series
from memtriage.diagnose.judge import (
    Evidence,
    NativeHolder,
    group_finding,
    host_finding,
    unnamed_growth,
    without_repeats,
)
from memtriage.diagnose.leaks import GroupGrowth
from memtriage.model.census import GroupDetail, HolderGroup
from memtriage.model.findings import Finding, Projection
from memtriage.model.paths import ANY_ITEM, HolderPath, Segment, SegmentKind
from memtriage.model.position import TrainingPosition
from support.paths import items_of, local, named, of_module

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
LOSSES = items_of("main", "losses")
HOLDER = (*LOSSES, Segment(SegmentKind.GRAD_FN, "MulBackward0"), Segment(SegmentKind.SAVED, "self"))


def series(values: list[int], first: int = 1) -> Series:
    return Series(list(range(first, first + len(values))), values)


def growing(steps: int, rate: int, base: int = 100 * MIB) -> list[int]:
    return [base + step * rate for step in range(steps)]


def evidence(
    values: list[int] | None = None, *, device: str = "cpu", limit: int | None = None,
    used: int | None = None, step: int = 20, microbatches: int = 1, quiet_since: int | None = None,
    into_step: int = 0,
) -> Evidence:  # fmt: skip
    return Evidence(
        {} if values is None else {device: series(values)},
        {} if limit is None else {device: limit},
        {} if used is None else {device: used},
        TrainingPosition(step=step, microbatch=into_step, microbatches_per_step=microbatches),
        quiet_since,
    )


def grown(
    anchor: HolderPath = LOSSES, holder: HolderPath = HOLDER, *, count: int = 4, nbytes: int = 4 * MIB,
    distance: int = 4, device: str = "cpu", owner: str = "saved for backward",
) -> GroupGrowth:  # fmt: skip
    whole = HolderGroup(
        device=device, anchor=anchor, path=holder, count=16, nbytes=4 * nbytes,
        tails={holder: 4 * nbytes}, owners={owner: 3 * nbytes, "variable": nbytes}, attached=holder != anchor,
    )  # fmt: skip
    return GroupGrowth(whole, holder, count, nbytes, distance)


def judged(growth: GroupGrowth, detail: GroupDetail | None = None, **known: Any) -> Finding | None:
    facts = {
        "evidence": evidence(), "scale": "step", "last_step": 12, "collector_off": False, "lengthening": False
    }  # fmt: skip
    return group_finding(growth, detail or GroupDetail(), **(facts | known))


def certain(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


# --- tensors ------------------------------------------------------------------------------------------------


def test_a_growing_group_is_a_leak_with_all_that_is_known() -> None:
    detail = GroupDetail(
        retained=3 * MIB,
        also_held_by=[of_module("train", "last")],
        allocated_at="train.py:7 in main",
        holder_kind="list",
    )
    facts = evidence(limit=GIB, used=GIB - 100 * MIB, step=20, microbatches=4)
    finding = certain(judged(grown(), detail, evidence=facts))
    assert (finding.kind, finding.device, finding.playbook, finding.step) == ("leak", "cpu", "M21", 12)
    assert (finding.bytes, finding.bytes_per_step, finding.bytes_per_microbatch) == (16 * MIB, MIB, MIB // 4)
    assert finding.holder == "frame main(): losses[*] -> grad_fn MulBackward0 -> saved self"
    assert finding.holder_path == HOLDER
    assert finding.also_held_by == ["train.last"]
    assert finding.also_held_by_paths == [of_module("train", "last")]
    assert finding.projection == Projection(device="cpu", limit=GIB, step=120)
    assert finding.allocated_at == "train.py:7 in main"
    assert "detach" in (finding.fix or "") and finding.mechanism
    came, retained, full = finding.evidence
    assert came.startswith("two censuses 4 steps apart: 4 more storages, 4.0 MiB more")
    assert "(list)" in retained and "3.0 MiB" in retained
    assert "1.0 GiB" in full and "full at step 120" in full
    assert finding.rank is None and finding.phase is None


MASKS = items_of("main", "masks")


@pytest.mark.parametrize(("nbytes", "named"), [(9 * MIB, True), (8 * MIB, False)])
def test_a_group_is_named_by_the_entry_that_keeps_most_of_it(nbytes: int, named: bool) -> None:
    one = grown(MASKS, MASKS, owner="known cache")
    one.group.known = {"te.causal_mask": nbytes}
    finding = certain(judged(one))
    assert ("te.causal_mask" in (finding.mechanism or "")) == named
    assert ("clear_caches(['te.causal_mask'])" in (finding.fix or "")) == named


def test_a_group_that_hangs_on_a_graph_is_explained_by_what_keeps_the_graph() -> None:
    one = grown()
    one.group.known = {"te.tensor_objects": 16 * MIB}
    assert "detach" in (certain(judged(one)).fix or "")


def test_a_container_with_a_bound_of_its_own_is_no_leak() -> None:
    assert judged(grown(), GroupDetail(bound=64, entries=12)) is None
    assert judged(grown(), GroupDetail(bound=64), scale="microbatch") is None
    assert judged(grown(), GroupDetail(entries=12)) is not None


@pytest.mark.parametrize(("collector_off", "kind"), [(True, "garbage_cycle"), (False, None)])
def test_garbage_is_a_finding_only_while_nothing_collects_it(collector_off: bool, kind: str | None) -> None:
    cycle = (Segment(SegmentKind.GARBAGE_CYCLE, "Node"), Segment(SegmentKind.ATTRIBUTE, "value"))
    one = grown(cycle, cycle, owner="garbage")
    finding = judged(one, collector_off=collector_off)
    assert (finding and finding.kind) == kind
    if finding is not None:
        assert "gc.enable" in (finding.fix or "")


def test_growth_that_stopped_is_no_leak() -> None:
    filled = growing(12, MIB) + [112 * MIB] * 12
    assert judged(grown(), evidence=evidence(filled)) is None
    assert judged(grown(), evidence=evidence(growing(24, MIB))) is not None


def test_too_few_steps_behind_the_last_census_clear_nobody() -> None:
    assert judged(grown(), evidence=evidence(growing(12, MIB) + [112 * MIB] * 5)) is not None


def test_other_counters_and_scales_do_not_clear() -> None:
    filled = growing(12, MIB) + [112 * MIB] * 12
    assert judged(grown(device="cuda:0"), evidence=evidence(filled)) is not None
    assert judged(grown(), evidence=evidence(filled), scale="microbatch") is not None


@pytest.mark.parametrize(
    ("scale", "per_step", "per_microbatch", "span"),
    [
        ("step", MIB, MIB // 2, "4 steps apart"),
        ("microbatch", None, MIB, "4 micro-batches of one step apart"),
        ("second", None, None, "4 seconds apart"),
    ],
)
def test_rates_are_given_on_the_scale_they_were_seen_on(
    scale: str, per_step: int | None, per_microbatch: int | None, span: str
) -> None:
    finding = certain(judged(grown(), scale=scale, evidence=evidence(microbatches=2)))
    assert (finding.bytes_per_step, finding.bytes_per_microbatch) == (per_step, per_microbatch)
    assert span in finding.evidence[0]


def test_a_leak_inside_a_step_is_projected_in_micro_batches() -> None:
    facts = evidence(limit=GIB, used=GIB - 100 * MIB)
    finding = certain(judged(grown(), scale="microbatch", evidence=facts))
    assert "full 100 micro-batches into a step" in finding.evidence[-1]
    # What is in use was counted behind the eighth of the step.
    facts = evidence(limit=GIB, used=GIB - 100 * MIB, into_step=8)
    finding = certain(judged(grown(), scale="microbatch", evidence=facts))
    assert "full 108 micro-batches into a step" in finding.evidence[-1]


@pytest.mark.parametrize("known", [{"limit": GIB}, {"used": GIB}, {}])
def test_without_limit_or_use_nothing_is_projected(known: dict[str, int]) -> None:
    finding = certain(judged(grown(), evidence=evidence(**known)))
    assert len(finding.evidence) == 1


def test_what_most_of_the_bytes_are_decides_the_explanation() -> None:
    one = grown(MASKS, MASKS, owner="optimizer state")
    assert "optimizer" in (certain(judged(one)).mechanism or "")


def test_a_lengthening_tensor_is_called_one() -> None:
    finding = certain(judged(grown(local("main", "seen"), local("main", "seen"), count=0), lengthening=True))
    assert "longer" in (finding.mechanism or "")
    assert finding.evidence[0] == "two censuses 4 steps apart: 4.0 MiB at the same place of the program"


def test_shared_memory_has_its_own_fix() -> None:
    finding = judged(grown(items_of("main", "seen"), items_of("main", "seen")), GroupDetail(shared=True))
    assert "clone()" in (certain(finding).fix or "")


# --- other memory of the host -------------------------------------------------------------------------------


def host(facts: Evidence) -> Finding | None:
    return host_finding(
        (*of_module("train", "texts"), ANY_ITEM), "list", 4 * MIB, 4, "train.py:9 in train", facts, 12
    )


def test_a_growing_container_of_data_is_a_leak_of_the_host() -> None:
    finding = certain(host(evidence(growing(24, MIB), microbatches=2)))
    assert (finding.kind, finding.device, finding.holder) == ("leak", "host", "train.texts[*]")
    assert (finding.bytes_per_step, finding.bytes_per_microbatch) == (MIB, MIB // 2)
    assert finding.allocated_at == "train.py:9 in train"
    assert (finding.mechanism or "").startswith("train.texts (list) gets new entries")
    assert "clear it" in (finding.fix or "")


def test_a_container_is_cleared_when_malloc_s_counter_stopped() -> None:
    assert host(evidence(growing(12, MIB) + [112 * MIB] * 12)) is None


def test_a_container_is_projected_on_the_host_s_limit() -> None:
    facts = evidence(device="host", limit=GIB, used=GIB - 50 * MIB, step=30)
    assert "host (limit 1.0 GiB) is full at step 80" in certain(host(facts)).evidence[-1]


# --- growth that no census names ----------------------------------------------------------------------------


def leak(per_step: int, device: str = "cpu") -> Finding:
    return Finding(kind="leak", device=device, bytes_per_step=per_step)


def test_a_long_steady_rise_without_a_name_is_c_plus_plus_s() -> None:
    finding = certain(unnamed_growth("cpu", evidence(growing(24, MIB), step=24, microbatches=2), []))
    assert (finding.kind, finding.device, finding.playbook, finding.step) == ("leak", "host", "M21", 24)
    assert (finding.bytes_per_step, finding.bytes_per_microbatch) == (MIB, MIB // 2)
    assert finding.bytes == 19 * MIB
    assert (finding.holder or "").startswith("C++ only")
    assert "native" in (finding.fix or "")
    assert finding.evidence == ["the counter of cpu rises by 1.0 MiB a step; censuses name 0 B of it"]


def test_on_a_gpu_it_stays_the_gpu_s() -> None:
    facts = evidence(growing(24, MIB), device="cuda:0")
    assert certain(unnamed_growth("cuda:0", facts, [])).device == "cuda:0"
    assert unnamed_growth("cpu", facts, []) is None


@pytest.mark.parametrize(
    "values",
    [
        growing(15, MIB),  # too short to say so
        growing(24, 31 * KIB),  # below the floor
        [100 * MIB] * 24,
        growing(12, MIB) + [112 * MIB] * 12,  # filled to a bound
        [100 * MIB + step % 8 * MIB + step // 8 * MIB for step in range(32)],  # what awaits the collector
        growing(24, -MIB),
    ],
    ids=["short", "small", "flat", "filled", "sawtooth", "falls"],
)
def test_what_is_no_long_steady_rise_is_not_blamed_on_native_code(values: list[int]) -> None:
    assert unnamed_growth("cpu", evidence(values), []) is None


@pytest.mark.parametrize(
    ("named", "missing"),
    [
        ([leak(MIB)], None),
        ([leak(MIB, "host")], None),
        ([leak(MIB // 2), leak(MIB // 3, "host")], None),
        ([leak(MIB // 4)], 3 * MIB // 4),
        ([leak(MIB, "cuda:0")], MIB),
        ([Finding(kind="leak", device="cpu", bytes_per_microbatch=MIB)], MIB),
    ],
)
def test_what_has_a_name_is_taken_off(named: list[Finding], missing: int | None) -> None:
    finding = unnamed_growth("cpu", evidence(growing(24, MIB)), named)
    assert (finding and finding.bytes_per_step) == missing


def test_the_undisturbed_part_behind_the_last_census_gives_the_rate() -> None:
    disturbed = growing(12, 4 * MIB) + growing(24, MIB, base=200 * MIB)
    facts = evidence(disturbed, quiet_since=12)
    assert certain(unnamed_growth("cpu", facts, [])).bytes_per_step == MIB
    assert certain(unnamed_growth("cpu", evidence(disturbed), [])).bytes_per_step != MIB


@pytest.mark.parametrize(
    ("holder", "fix"),
    [
        (
            NativeHolder(
                (*of_module("train", "losses"), ANY_ITEM, Segment(SegmentKind.GRAD_FN)), "autograd nodes", 4
            ),
            "loss.detach()",
        ),
        (NativeHolder(of_module("train", "groups"), "ProcessGroup", 4), "destroy_process_group"),
        (
            NativeHolder(of_module("torch.distributed.distributed_c10d", "_world"), "X", 4),
            "destroy_process_group",
        ),
        (NativeHolder(of_module("train", "tables"), "Table", 4), "clear it"),
    ],
)
def test_a_holder_of_native_objects_is_named(holder: NativeHolder, fix: str) -> None:
    facts = evidence(growing(24, MIB))
    finding = certain(
        unnamed_growth("cpu", facts, [], [holder, NativeHolder(of_module("other", "tables"), "Table", 1)])
    )
    assert (finding.holder_path, finding.playbook) == (holder.path, "M21")
    assert fix in (finding.fix or "")
    assert any(f"4 more objects ({holder.what})" in line for line in finding.evidence)


# --- repeats ------------------------------------------------------------------------------------------------


def test_a_leak_seen_on_two_scales_is_one() -> None:
    within = Finding(
        kind="leak",
        device="cuda:0",
        holder_path=HOLDER,
        bytes=5,
        bytes_per_microbatch=300,
        allocated_at="a.py:1 in f",
    )
    across = Finding(kind="leak", device="cuda:0", holder_path=HOLDER, bytes=9, bytes_per_step=1200)
    for findings in ([within, across], [across, within]):
        copies = [Finding(**{name: getattr(f, name) for name in f.__struct_fields__}) for f in findings]
        (one,) = without_repeats(copies)
        assert (one.bytes, one.bytes_per_step, one.bytes_per_microbatch) == (9, 1200, 300)
        assert one.allocated_at == "a.py:1 in f"


def test_the_same_holder_on_two_devices_is_two_leaks_the_larger_first() -> None:
    found = without_repeats(
        [
            Finding(kind="leak", device="cpu", holder_path=HOLDER, bytes_per_step=10),
            Finding(kind="leak", device="cuda:0", holder_path=HOLDER, bytes_per_step=1000),
            Finding(kind="leak", device="cpu", holder="other", bytes_per_microbatch=100),
        ]
    )
    assert [finding.bytes_per_step for finding in found] == [1000, None, 10]


@given(
    st.lists(
        st.builds(
            lambda device, holder, step, micro: Finding(
                kind="leak",
                device=device,
                holder_path=named(holder),
                bytes_per_step=step,
                bytes_per_microbatch=micro,
            ),
            st.sampled_from(["cpu", "cuda:0"]),
            st.sampled_from(["a", "b", "c"]),
            st.none() | st.integers(1, 1 << 30),
            st.none() | st.integers(1, 1 << 30),
        ),
        max_size=8,
    )
)
def test_there_is_one_finding_for_each_holder(findings: list[Finding]) -> None:
    places = {(finding.device, finding.holder) for finding in findings}
    found = without_repeats(findings)
    assert {(finding.device, finding.holder) for finding in found} == places
    assert len(found) == len(places)
    stepped = {(f.device, f.holder) for f in findings if f.bytes_per_step is not None}
    assert {(f.device, f.holder) for f in found if f.bytes_per_step is not None} == stepped
