"""The judgment: which of the things that grew are leaks, at what rate, and until when they fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memtriage.diagnose.growth.proof import Proof
from memtriage.diagnose.judge import (
    ScaleEvidence,
    data_finding,
    holder_finding,
    unnamed_growth,
)
from memtriage.model.census import GroupDetail
from memtriage.model.findings import Finding, Projection
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from memtriage.model.position import Scale
from memtriage.model.units import MIB
from memtriage.playbook.entries import LEAKS
from memtriage.playbook.mechanisms import MECHANISMS
from support.growths import TEXTS, data_of, evidence, grown
from support.paths import items_of, local, of_module

GIB = 1024 * MIB


def certain(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


# --- holders ------------------------------------------------------------------------------------------------


def test_a_holder_that_grows_is_a_leak_with_all_that_is_known() -> None:
    detail = GroupDetail(
        retained=3 * MIB,
        retained_of=4 * MIB,
        retained_at=12,
        also_held_by=[of_module("train", "last")],
        allocated_at="train.py:7 in main",
        holder_kind="list",
        saved_by="MulBackward0 in model.fc",
    )
    facts = evidence(MIB, limit=GIB, used=GIB - 100 * MIB, microbatches=4)
    finding = certain(holder_finding(grown(nodes=7), detail, facts))
    assert (finding.kind, finding.device, finding.step) == ("leak", "cpu", 20)
    assert finding.certainty == "proven"
    assert (finding.bytes_per_step, finding.bytes_per_microbatch) == (MIB, MIB // 4)
    assert finding.bytes == 4 * MIB + 28 * 100  # with the nodes that it keeps
    assert finding.bytes_step == grown().holding.sizes[-1].position
    assert finding.holder == "frame main(): losses[*] -> grad_fn MulBackward0 -> saved self"
    assert finding.also_held_by_paths == [of_module("train", "last")]
    assert finding.projection == Projection(device="cpu", limit=GIB, step=120)
    assert finding.allocated_at == "train.py:7 in main"
    assert "detach" in (finding.fix or "") and finding.mechanism
    came, retained, saved, full = finding.evidence
    assert came.startswith("4 censuses, at steps 4, 8, 12, 16: 1.0 MiB, 2.0 MiB, 3.0 MiB, 4.0 MiB")
    assert "3 more storages" in came and "21 more autograd nodes" in came
    assert retained == "at step 12 the holding object (list) alone retained 3.0 MiB of 4.0 MiB"
    assert "MulBackward0 in model.fc" in saved
    assert "full at step 120" in full


def test_only_the_censuses_of_the_proof_are_told() -> None:
    finding = certain(holder_finding(grown(proof=Proof("proven", MIB, 3, 8)), GroupDetail(), evidence()))
    assert finding.evidence[0].startswith("3 censuses, at steps 8, 12, 16: 2.0 MiB, 3.0 MiB, 4.0 MiB")


def test_a_suspicion_says_what_is_open() -> None:
    proof = Proof("suspected", MIB, 2, 8, "it grew over 2 of 3 intervals")
    finding = certain(holder_finding(grown(proof=proof), GroupDetail(), evidence()))
    assert finding.certainty == "suspected"
    assert "suspected only: it grew over 2 of 3 intervals" in finding.evidence


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (evidence(), False),
        (evidence(MIB, state="flat"), False),
        (evidence(MIB / 4), False),
        (evidence(MIB), True),
        (evidence(MIB, state="undecided"), True),
    ],
)
def test_a_single_rise_is_told_only_where_a_counter_shows_it(facts: ScaleEvidence, told: bool) -> None:
    """Most programs allocate something once."""
    one = grown(proof=Proof("suspected", MIB, 1, 12, "it grew over 1 of 3 intervals"))
    assert (holder_finding(one, GroupDetail(), facts) is not None) is told


def test_what_a_counter_contradicts_is_no_finding() -> None:
    assert holder_finding(grown(proof=Proof(None, MIB, 3, 4, "no")), GroupDetail(), evidence()) is None


MASKS = items_of("main", "masks")


@pytest.mark.parametrize(("nbytes", "named"), [(3 * MIB, True), (2 * MIB, False)])
def test_a_group_is_named_by_the_entry_that_keeps_most_of_it(nbytes: int, named: bool) -> None:
    one = grown(MASKS, MASKS, owner="known cache", known={"te.causal_mask": nbytes})
    finding = certain(holder_finding(one, GroupDetail(), evidence()))
    assert ("te.causal_mask" in (finding.mechanism or "")) == named
    assert ("clear_caches(['te.causal_mask'])" in (finding.fix or "")) == named


def test_attached_group_is_explained_by_the_graphs_holder() -> None:
    one = grown(known={"te.tensor_objects": 4 * MIB})
    assert "detach" in (certain(holder_finding(one, GroupDetail(), evidence())).fix or "")


@pytest.mark.parametrize("scale", ["step", "microbatch", "second"])
def test_a_container_with_a_bound_of_its_own_is_no_leak(scale: Scale) -> None:
    facts = evidence(MIB, scale=scale)
    values = grown(MASKS, MASKS)
    assert holder_finding(values, GroupDetail(bound=64, entries=12), facts) is None
    assert holder_finding(values, GroupDetail(entries=12), facts) is not None


def test_a_container_that_is_far_from_its_bound_must_not_keep_graphs() -> None:
    facts = evidence(MIB)
    assert holder_finding(grown(), GroupDetail(bound=64, entries=40), facts) is None
    finding = certain(holder_finding(grown(), GroupDetail(bound=64, entries=12), facts))
    assert "detach" in (finding.fix or "")


@pytest.mark.parametrize(("collector_off", "kind"), [(True, "garbage_cycle"), (False, None)])
def test_garbage_is_a_finding_only_while_nothing_collects_it(collector_off: bool, kind: str | None) -> None:
    cycle = (PathSegment(SegmentKind.GARBAGE_CYCLE, "Node"), PathSegment(SegmentKind.ATTRIBUTE, "value"))
    one = grown(cycle, cycle, owner="garbage")
    finding = holder_finding(one, GroupDetail(), evidence(collector_off=collector_off))
    assert (finding and finding.kind) == kind
    if finding is not None:
        assert "gc.enable" in (finding.fix or "")


def test_what_most_of_the_bytes_are_decides_the_explanation() -> None:
    one = grown(MASKS, MASKS, owner="optimizer state")
    assert "optimizer" in (certain(holder_finding(one, GroupDetail(), evidence())).mechanism or "")


def test_a_lengthening_tensor_is_called_one() -> None:
    seen = local("main", "seen")
    finding = certain(holder_finding(grown(seen, seen, count=0), GroupDetail(), evidence()))
    assert "longer" in (finding.mechanism or "")
    assert finding.evidence[0].endswith("4.0 MiB at the same place")


def test_shared_memory_has_its_own_fix() -> None:
    seen = items_of("main", "seen")
    finding = holder_finding(grown(seen, seen), GroupDetail(shared=True), evidence())
    assert "clone()" in (certain(finding).fix or "")


def test_the_object_that_retains_is_named_where_its_kind_is_known() -> None:
    def retained(detail: GroupDetail) -> str:
        return certain(holder_finding(grown(), detail, evidence())).evidence[1]

    known = GroupDetail(retained=3 * MIB, retained_of=4 * MIB, holder_kind="deque")
    assert retained(known) == "the holding object (deque) alone retained 3.0 MiB of 4.0 MiB"
    known = GroupDetail(retained=3 * MIB, retained_of=4 * MIB)
    assert retained(known) == "the holding object alone retained 3.0 MiB of 4.0 MiB"
    unknown = certain(holder_finding(grown(), GroupDetail(retained=3 * MIB), evidence()))
    assert len(unknown.evidence) == 1


@pytest.mark.parametrize(("scale", "step"), [("step", 16), ("microbatch", None), ("second", None)])
def test_only_sizes_at_steps_say_their_step(scale: Scale, step: int | None) -> None:
    assert certain(holder_finding(grown(), GroupDetail(), evidence(scale=scale))).bytes_step == step


# --- rates --------------------------------------------------------------------------------------------------


def rates(facts: ScaleEvidence) -> tuple[int | None, int | None, int | None]:
    finding = certain(holder_finding(grown(), GroupDetail(), facts))
    return finding.bytes_per_step, finding.bytes_per_microbatch, finding.bytes_per_second


@pytest.mark.parametrize(
    ("scale", "expected", "span"),
    [
        ("step", (MIB, MIB // 2, None), "steps"),
        ("microbatch", (None, MIB, None), "backwards"),
        ("second", (None, None, MIB), "seconds"),
    ],
)
def test_rates_are_given_on_the_scale_they_were_seen_on(
    scale: Scale, expected: tuple[int | None, ...], span: str
) -> None:
    facts = evidence(scale=scale, microbatches=2)
    assert rates(facts) == expected
    assert f"at {span} 4, 8" in certain(holder_finding(grown(), GroupDetail(), facts)).evidence[0]


def test_lasting_growth_within_a_step_is_growth_per_step() -> None:
    assert rates(evidence(2 * MIB, scale="microbatch", microbatches=2)) == (2 * MIB, MIB, None)
    assert rates(evidence(MIB / 4, scale="microbatch", microbatches=2)) == (None, MIB, None)


def test_a_leak_inside_a_step_is_projected_in_micro_batches() -> None:
    facts = evidence(limit=GIB, used=GIB - 100 * MIB, scale="microbatch")
    finding = certain(holder_finding(grown(), GroupDetail(), facts))
    assert "full 100 micro-batches into a step" in finding.evidence[-1]
    # What is in use was counted after the eighth of the step.
    facts = evidence(limit=GIB, used=GIB - 100 * MIB, scale="microbatch", into_step=8)
    finding = certain(holder_finding(grown(), GroupDetail(), facts))
    assert "full 108 micro-batches into a step" in finding.evidence[-1]


def test_micro_batches_of_several_backwards_say_so() -> None:
    facts = evidence(scale="microbatch")
    finding = certain(holder_finding(grown(), GroupDetail(), facts, period=3))
    assert any("3 backwards" in line and "3.0 MiB" in line for line in finding.evidence)


@pytest.mark.parametrize("known", [{"limit": GIB}, {"used": GIB}, {}])
def test_without_limit_or_use_nothing_is_projected(known: dict[str, int]) -> None:
    finding = certain(holder_finding(grown(), GroupDetail(), evidence(**known)))
    assert finding.projection is None and len(finding.evidence) == 1


# --- other memory of the host -------------------------------------------------------------------------------


def test_a_growing_container_of_data_is_a_leak_of_the_host() -> None:
    finding = certain(data_finding(data_of(), evidence(microbatches=2)))
    assert (finding.kind, finding.device, finding.holder) == ("leak", "host", "train.texts[*]")
    assert (finding.bytes_per_step, finding.bytes_per_microbatch) == (MIB, MIB // 2)
    assert (finding.certainty, finding.bytes) == ("proven", 16 * MIB)
    assert finding.allocated_at == "train.py:9 in train"
    assert (finding.mechanism or "").startswith("train.texts (list) gets new entries")
    assert "clear it" in (finding.fix or "")
    assert finding.evidence[0].startswith("12 more entries of about 1.0 MiB between steps 4 and 16")


@pytest.mark.parametrize(
    ("intervals", "scale", "told"), [(2, "step", True), (1, "step", False), (2, "second", False)]
)
def test_suspected_data_is_reported_after_growing_twice(intervals: int, scale: Scale, told: bool) -> None:
    one = data_of(Proof("suspected", MIB, intervals, 4, "it grew over 2 of 3 intervals"))
    finding = data_finding(one, evidence(scale=scale))
    assert (finding is not None) is told
    if finding is not None:
        assert "suspected only" in finding.evidence[1]


@pytest.mark.parametrize(
    ("path", "classes", "mechanism", "fix"),
    [
        (
            (*of_module("torch.jit._recursive", "concrete_type_store"), ANY_ITEM),
            ("torch.jit._recursive.ConcreteTypeStore",),
            "concrete_type_store gets new entries: torch.jit keeps what it compiled",
            "trace or script the module once",
        ),
        (
            (PathSegment(SegmentKind.LRU_CACHE, "tokenize"), ANY_ITEM),
            (),
            "functools.lru_cache tokenize keeps every value",
            "cache_clear()",
        ),
        (items_of("main", "todo"), ("queue.Queue",), "new entries: it is filled faster", "maxsize"),
    ],
)
def test_data_has_the_mechanism_of_what_holds_it(
    path: HolderPath, classes: tuple[str, ...], mechanism: str, fix: str
) -> None:
    growth = data_of(path=path)
    finding = certain(data_finding(replace(growth, data=replace(growth.data, classes=classes)), evidence()))
    assert mechanism in (finding.mechanism or "") and fix in (finding.fix or "")


def test_a_container_is_projected_on_the_host_s_limit() -> None:
    facts = evidence(counter="host", limit=GIB, used=GIB - 50 * MIB, step=30)
    assert "host (limit 1.0 GiB) is full at step 80" in certain(data_finding(data_of(), facts)).evidence[-1]


# --- growth that no census names ----------------------------------------------------------------------------


def leak(per_step: int, device: str = "cpu") -> Finding:
    return Finding(kind="leak", device=device, bytes_per_step=per_step)


def test_a_rise_without_a_name_is_c_plus_plus_s() -> None:
    finding = certain(unnamed_growth("cpu", evidence(MIB, step=24, microbatches=2), [], 0.0, False))
    assert (finding.kind, finding.device, finding.playbook, finding.step) == ("leak", "host", LEAKS, 24)
    assert (finding.bytes_per_step, finding.bytes_per_microbatch) == (MIB, MIB // 2)
    assert (finding.certainty, finding.bytes) == ("proven", 20 * MIB)
    assert (finding.holder or "").startswith("C++ only")
    assert "native" in (finding.fix or "")
    assert finding.evidence == [
        "the counter of cpu rises by 1.0 MiB per step (921.6 KiB to 1.1 MiB); censuses name 0 B of it"
    ]


def test_by_time_it_is_counted_in_seconds() -> None:
    finding = certain(unnamed_growth("cpu", evidence(MIB, scale="second"), [], 0.0, False))
    assert (finding.bytes_per_second, finding.bytes_per_step) == (MIB, None)
    assert "per second" in finding.evidence[0]


def test_growth_under_the_profiler_is_the_profilers() -> None:
    profiled = replace(evidence(MIB), profiled=True)
    finding = certain(unnamed_growth("cpu", profiled, [], 0.0, False))
    assert finding.certainty == "proven"
    assert "profiler is on" in (finding.mechanism or "") and "profiler.schedule(" in (finding.fix or "")
    assert certain(unnamed_growth("cpu", evidence(MIB), [], 0.0, False)).fix != finding.fix


def test_growth_without_the_resident_set_is_suspected_only() -> None:
    finding = certain(unnamed_growth("cpu", evidence(MIB), [], 0.0, True))
    assert finding.certainty == "suspected"
    assert any("resident set" in line for line in finding.evidence)


def test_on_a_gpu_it_stays_the_gpu_s() -> None:
    facts = evidence(MIB, counter="cuda:0")
    assert certain(unnamed_growth("cuda:0", facts, [], 0.0, False)).device == "cuda:0"
    assert unnamed_growth("cpu", facts, [], 0.0, False) is None


@pytest.mark.parametrize("state", ["too_short", "flat", "undecided"])
def test_what_does_not_surely_grow_is_not_blamed_on_native_code(state: str) -> None:
    assert unnamed_growth("cpu", evidence(MIB, state=state), [], 0.0, False) is None


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
    finding = unnamed_growth("cpu", evidence(MIB), named, 0.0, False)
    assert (finding and finding.bytes_per_step) == missing


def test_what_is_only_suspected_to_grow_explains_no_more_than_it_rose_by() -> None:
    once = Finding(kind="leak", device="cpu", bytes_per_step=MIB // 2, certainty="suspected")
    finding = unnamed_growth("cpu", evidence(MIB), [once], MIB / 8, False)
    assert certain(finding).bytes_per_step == 7 * MIB // 8


@pytest.mark.parametrize(("held", "missing"), [(MIB / 4, 3 * MIB // 4), (MIB, None), (2 * MIB, None)])
def test_what_any_holder_has_more_of_is_not_native(held: float, missing: int | None) -> None:
    finding = unnamed_growth("cpu", evidence(MIB), [], held, False)
    assert (finding and finding.bytes_per_step) == missing


def test_containers_of_the_host_explain_its_counter_and_no_gpu_s() -> None:
    data = Finding(kind="leak", device="host", bytes_per_step=MIB // 2, certainty="suspected")
    on_host = unnamed_growth("cpu", evidence(MIB), [data], MIB / 8, False)
    assert certain(on_host).bytes_per_step == 3 * MIB // 8
    on_gpu = unnamed_growth("cuda:0", evidence(MIB, counter="cuda:0"), [data], MIB / 8, False)
    assert certain(on_gpu).bytes_per_step == 7 * MIB // 8


def test_before_two_censuses_can_tell_it_is_suspected_only() -> None:
    finding = certain(unnamed_growth("cpu", evidence(MIB), [], None, False))
    assert finding.certainty == "suspected"
    assert (finding.holder, finding.mechanism) == ("not named", MECHANISMS["not named"].mechanism)
    assert any("do not show what holds it" in line for line in finding.evidence)


@pytest.mark.parametrize(("entry_bytes", "named"), [(MIB, True), (MIB // 3, False), (3 * MIB, False)])
def test_a_container_that_grew_as_fast_names_what_a_counter_shows(entry_bytes: int, named: bool) -> None:
    container = replace(data_of().data, entry_bytes=entry_bytes)
    finding = certain(unnamed_growth("cpu", evidence(MIB), [], 0.0, False, containers=[container]))
    assert (finding.certainty, finding.bytes_per_step) == ("proven", MIB)
    assert (finding.holder_path == TEXTS) is named
    assert ("clear it" in (finding.fix or "")) is named


def test_native_objects_of_a_known_library_have_its_fix() -> None:
    growth = data_of(native="ConcreteModuleType")
    known = replace(growth.data, classes=("torch.jit._recursive.ConcreteTypeStore",))
    finding = certain(unnamed_growth("cpu", evidence(MIB), [], 0.0, False, [replace(growth, data=known)]))
    assert "ConcreteModuleType: torch.jit keeps" in (finding.mechanism or "")
    assert "once, before the loop" in (finding.fix or "")


@pytest.mark.parametrize(
    ("path", "kind", "fix"),
    [
        (of_module("train", "groups"), "ProcessGroup", "destroy_process_group"),
        (of_module("torch.distributed.distributed_c10d", "_world"), "X", "destroy_process_group"),
        (of_module("train", "tables"), "Table", "clear it"),
    ],
)
def test_a_holder_of_native_objects_is_named(path: HolderPath, kind: str, fix: str) -> None:
    native = [data_of(), data_of(native=kind, path=path)]
    finding = certain(unnamed_growth("cpu", evidence(MIB), [], 0.0, False, native))
    assert (finding.holder_path, finding.playbook) == (path, LEAKS)
    assert fix in (finding.fix or "")


@pytest.mark.parametrize(("known", "is_named"), [(700_000, False), (700_001, True)])
def test_three_tenths_of_a_rate_without_a_name_are_native(known: int, is_named: bool) -> None:
    finding = unnamed_growth("cpu", evidence(1_000_000), [leak(known)], 0.0, False)
    assert (finding is None) == is_named
    assert finding is None or finding.bytes_per_step == 300_000


@pytest.mark.parametrize(("nodes", "device"), [(10_000, "cuda:0"), (14_000, "host")])
def test_a_leak_is_in_the_memory_that_grew_most(nodes: int, device: str) -> None:
    # 3 MiB more of storages on the GPU, and 3.0 or 4.2 million bytes more of autograd nodes on the host.
    finding = certain(holder_finding(grown(device="cuda:0", nodes=nodes), GroupDetail(), evidence()))
    assert finding.device == device


def test_a_step_without_micro_batches_counts_as_one() -> None:
    assert rates(evidence(microbatches=0)) == (MIB, MIB, None)


def test_a_named_leak_explains_the_counter_of_its_own_device() -> None:
    facts = evidence(MIB, counter="cuda:0")
    assert unnamed_growth("cuda:0", facts, [leak(MIB, "cuda:0")], 0.0, False) is None
    assert certain(unnamed_growth("cuda:0", facts, [leak(MIB)], 0.0, False)).bytes_per_step == MIB


@pytest.mark.parametrize(("step", "nbytes"), [(4, MIB), (5, MIB), (6, 2 * MIB)])
def test_growth_since_its_onset_is_at_least_one_position_old(step: int, nbytes: int) -> None:
    assert certain(unnamed_growth("cpu", evidence(MIB, step=step), [], 0.0, False)).bytes == nbytes
