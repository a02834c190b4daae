"""From the evidence of a run to findings and limits: one pure function, also of a record."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memtriage.catalogue.growing import PROFILER
from memtriage.diagnose.growth.attribution import attribute
from memtriage.diagnose.growth.census_plan import suspicion_of
from memtriage.diagnose.growth.estimate import policy_of
from memtriage.diagnose.growth.evidence import Evidence
from memtriage.diagnose.growth.judgment import worth_reporting
from memtriage.diagnose.verdict import verdict
from memtriage.model.census import GroupDetail
from memtriage.model.evidence import CensusSeen, Situation
from memtriage.model.findings import Finding
from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.model.position import TrainingPosition
from memtriage.playbook.mechanisms import MECHANISMS
from memtriage.report.growth_words import judged_again
from memtriage.store.reader import RankRecord
from memtriage.store.records import End, Start
from support.judged import a_leak, judge
from support.observed import BASE, Found, data, held, items, observed

KIB, MIB, GIB = 1024, 1024**2, 1024**3
STEPS = 60
CENSUSES = (15, 30, 45, 60)
ELSEWHERE = {"cuda:1": [BASE] * STEPS}
"""A counter that sees nothing of what grows."""


def rising(rate: float, steps: int = STEPS) -> list[float]:
    return [BASE + rate * at for at in range(1, steps + 1)]


def keeping(rate: float = MIB, **more: Any) -> Callable[[int], Found]:
    """A list that gets one storage at each step."""
    return lambda at: [held(rate * at, at, **more)]


def leaking(rate: float = MIB, device: str = "cpu", **more: Any) -> Evidence:
    """A run whose list and counter grow by so many bytes at each position."""
    return observed({device: rising(rate)}, keeping(rate, device=device), CENSUSES, **more)


def the(evidence: Evidence) -> Finding:
    (finding,) = judge(evidence).findings
    return finding


def rates(finding: Finding) -> tuple[int | None, int | None, int | None]:
    return finding.bytes_per_step, finding.bytes_per_microbatch, finding.bytes_per_second


# --- what leaks ---------------------------------------------------------------------------------------------


def test_a_list_that_grows_with_its_counter_is_a_proven_leak() -> None:
    finding = the(leaking())
    assert (finding.kind, finding.device, finding.certainty) == ("leak", "cpu", "proven")
    assert finding.holder_path == items("kept")
    assert (finding.bytes, finding.bytes_step, finding.step) == (60 * MIB, 60, 60)
    assert finding.bytes_per_step == pytest.approx(MIB, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "every", "together"), [("models", 1, True), ("models", 2, False), ("batches", 1, False)]
)
def test_small_parts_of_entries_come_with_the_large_ones(name: str, every: int, together: bool) -> None:
    """A part below a tenth of the rise is not seen in it, and two censuses alone prove nothing."""

    def at_each(step: int) -> Found:
        weight = (*items("models"), PathSegment(SegmentKind.ATTRIBUTE, "weight"))
        other = (*items(name), PathSegment(SegmentKind.ATTRIBUTE, "bias"))
        large, small = held(MIB * step, step), held(MIB // 12 * step, step // every, number=2)
        return [
            msgspec.structs.replace(large, anchor=weight, path=weight),
            msgspec.structs.replace(small, anchor=other, path=other),
        ]

    found = judge(observed({"cpu": rising(MIB + MIB // 12)}, at_each, [4, STEPS])).findings
    (finding,) = (each for each in found if each.certainty == "proven")
    small = MIB // 12 if together else 0
    assert finding.bytes_per_step == pytest.approx(MIB + small, rel=0.02)
    assert finding.bytes == pytest.approx(STEPS * (MIB + small), rel=0.02)


@pytest.mark.parametrize(("more", "clean"), [(1, False), (0, True)])
def test_a_run_is_not_clean_if_what_holds_more_and_more_is_another_each_time(more: int, clean: bool) -> None:
    """A list of copies may be another one at each step, and a batch may get longer."""

    def copies(step: int) -> Found:
        return [held(MIB * step, 1 + more * step, number=step)]

    evidence = observed({"cpu": rising(MIB)}, copies, CENSUSES)
    for before, census in pairwise(evidence.main.censuses):
        census.gone = [seen.id for seen in before.holders]
    judged = judge(evidence)
    assert judged.findings == []
    assert (verdict(judged.findings, False, judged.judged) == "clean") is clean


@pytest.mark.parametrize("left", [[], [held(MIB, 1)]])
def test_a_size_has_the_step_of_the_census_that_saw_it(left: Found) -> None:
    def found(at: int) -> Found:
        return left if at == STEPS else [held(MIB * at, at)]  # its function has returned before the last

    finding = the(observed({"cpu": rising(MIB)}, found, CENSUSES, last={"between": False}))
    assert (finding.bytes, finding.bytes_step) == (45 * MIB, 45)


def test_lines_of_the_program_are_those_of_the_last_census() -> None:
    detail = GroupDetail(allocated_at="train.py:7 in step", stored_at="train.py:9 in step")
    finding = the(observed({"cpu": rising(MIB)}, keeping(detail=detail), CENSUSES))
    assert (finding.allocated_at, finding.stored_at) == (detail.allocated_at, detail.stored_at)


def test_graphs_that_are_kept_are_host_memory() -> None:
    def found(at: int) -> Found:
        return [held(4 * at, at, kept=60 * KIB * at, nodes=100 * at, attached=True)]

    finding = the(observed({"cpu": rising(60 * KIB + 4)}, found, CENSUSES))
    assert (finding.device, finding.certainty) == ("host", "proven")
    assert finding.bytes_per_step == pytest.approx(60 * KIB, rel=0.01)


def test_host_memory_of_a_leak_on_a_gpu_is_part_of_it() -> None:
    def found(at: int) -> Found:
        return [
            held(MIB * at, at, device="cuda:0", attached=True, number=1),
            held(0, 0, kept=60 * KIB * at, nodes=100 * at, number=2),
        ]

    finding = the(observed({"cuda:0": rising(MIB), "cpu": rising(60 * KIB)}, found, CENSUSES))
    assert (finding.device, finding.bytes_per_step) == ("cuda:0", pytest.approx(MIB, rel=1e-3))
    assert any("host memory" in line for line in finding.evidence)


@pytest.mark.parametrize(("off", "kinds"), [(True, ["garbage_cycle"]), (False, [])])
def test_garbage_cycles_are_a_leak_if_the_collector_is_off(off: bool, kinds: list[str]) -> None:
    cycle = (PathSegment(SegmentKind.GARBAGE_CYCLE, "Node"),)

    def found(at: int) -> Found:
        return [held(MIB * at, at, anchor=cycle, path=cycle)]

    evidence = observed({"cpu": rising(MIB)}, found, CENSUSES, collector_off=off)
    assert [finding.kind for finding in judge(evidence).findings if finding.holder_path == cycle] == kinds


@pytest.mark.parametrize(
    ("bound", "entries", "attached", "leaks"),
    [
        pytest.param(100, 60, False, False, id="a queue with a maximum length"),
        pytest.param(None, 60, False, True, id="a queue without one"),
        pytest.param(100_000, 60, True, True, id="graphs in a queue for plain values"),
        pytest.param(100, 60, True, False, id="graphs in a queue that is nearly full"),
    ],
)
def test_a_container_with_a_bound_is_no_leak(
    bound: int | None, entries: int, attached: bool, leaks: bool
) -> None:
    detail = GroupDetail(bound=bound, entries=entries)
    evidence = observed(ELSEWHERE, keeping(detail=detail, attached=attached), CENSUSES)
    assert bool(judge(evidence).findings) is leaks


def test_growth_that_no_holder_explains_is_native() -> None:
    """The censuses cover the growth, and name nothing."""
    finding = the(observed({"cpu": rising(MIB)}, censuses=CENSUSES))
    assert (finding.kind, finding.device, finding.certainty) == ("leak", "host", "proven")
    assert finding.holder_path is None
    assert finding.bytes_per_step == pytest.approx(MIB, rel=1e-3)


def test_the_last_rise_of_a_list_that_is_emptied_now_and_then_proves_no_leak() -> None:
    """What is computed from its entries stays: the counter does not fall to where it was."""
    at = np.arange(1, 401)
    counter = BASE + 40 * KIB * (at % 150) + 3 * MIB * (at >= 150)
    evidence = observed(
        {"cpu": counter}, lambda at: [held(40 * KIB * (at % 150), at % 150)], range(385, 401, 5)
    )
    assert "proven" not in [finding.certainty for finding in judge(evidence).findings]


def kept_by_c(rate: float, **census: Any) -> Evidence:
    """A run whose heap grows by small objects of Python, which malloc does not see."""
    return observed({"cpu": rising(0), "heap": rising(rate)}, censuses=CENSUSES, **census)


def test_small_objects_that_grow_are_ordinary_data_however_little_the_resident_set_shows() -> None:
    counters = {"cpu": rising(0), "heap": rising(9 * KIB), "host": rising(0)}
    finding = the(observed(counters, lambda at: [data(90 * at, 100)], CENSUSES))
    assert (finding.certainty, finding.holder_path) == ("proven", items("rows"))
    assert finding.bytes_per_step == pytest.approx(9000, rel=0.01)


def test_small_objects_that_no_census_lists_are_a_leak_unless_they_may_be_garbage() -> None:
    assert the(kept_by_c(90 * KIB, tracked=1000)).holder_path is None
    # The collector tracks 20 more objects each step, and has not looked at the old ones.
    garbage, looked = kept_by_c(90 * KIB), kept_by_c(90 * KIB)
    for evidence, collections in ((garbage, 0), (looked, 1)):
        for number, census in enumerate(evidence.main.censuses):
            census.tracked, census.collections = 1000 + 20 * CENSUSES[number], collections * number
    assert the(looked).bytes_per_step == pytest.approx(90 * KIB, rel=0.01)
    assert judge(garbage).findings == []


def test_a_clean_run_states_no_limit_below_what_its_small_objects_grew_by() -> None:
    evidence = kept_by_c(20 * KIB)
    for number, census in enumerate(evidence.main.censuses):
        census.tracked = 1000 * number  # it may be garbage
    limit = judge(evidence).judged["cpu"].detection_limit
    assert limit is not None and 20 * KIB <= limit.bytes < 21 * KIB


@pytest.mark.parametrize(("collectives", "leaks"), [(0, True), (2000, False)])
def test_the_record_of_collectives_is_no_leak_until_it_is_full(collectives: int, leaks: bool) -> None:
    evidence = observed({"cpu": rising(40 * KIB)}, censuses=CENSUSES, situation={"collectives": collectives})
    assert bool(judge(evidence).findings) is leaks


def test_native_growth_is_what_holders_do_not_explain() -> None:
    evidence = observed({"cpu": rising(4 * MIB)}, keeping(), CENSUSES)
    by_holder = {finding.holder_path: finding for finding in judge(evidence).findings}
    assert by_holder.keys() == {items("kept"), None}
    assert by_holder[items("kept")].bytes_per_step == pytest.approx(MIB, rel=1e-3)
    assert by_holder[None].bytes_per_step == pytest.approx(3 * MIB, rel=1e-2)


@pytest.mark.parametrize("censuses", [{}, {"censuses": CENSUSES, "partial": True}], ids=["none", "partial"])
def test_growth_that_no_census_of_all_covers_is_only_suspected(censuses: dict[str, Any]) -> None:
    finding = the(observed({"cpu": rising(MIB)}, **censuses))
    assert (finding.certainty, finding.holder) == ("suspected", "not named")
    assert finding.mechanism == MECHANISMS["not named"].mechanism


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_resident_set_that_stays_doubts_native_growth_of_the_host_alone(device: str) -> None:
    counters = {device: rising(MIB), "host": rising(0)}
    finding = the(observed(counters, censuses=CENSUSES))
    assert finding.certainty == ("suspected" if device == "cpu" else "proven")


def test_the_resident_set_alone_shows_no_leak() -> None:
    assert judge(observed({"host": rising(MIB)}, censuses=CENSUSES)).findings == []


def other_memory(
    least: Callable[[int], float],
    most: Callable[[int], float],
    censuses: Sequence[int] = CENSUSES,
    counter: str = "host",
    values: Sequence[float] = rising(MIB),
) -> Evidence:
    """A run whose resident set rises, with what there was at each census that no census lists."""
    evidence = observed({"cpu": rising(0), counter: values}, censuses=censuses)
    for census in evidence.main.censuses:
        at = census.position.step
        census.other_memory = {counter: (int(least(at)), int(most(at)))}
    return evidence


@pytest.mark.parametrize(
    ("counter", "mechanism"), [("host", "other anonymous memory"), ("shared", "mapped shared memory")]
)
def test_memory_that_no_census_lists_leaks(counter: str, mechanism: str) -> None:
    finding = the(other_memory(lambda at: MIB * at, lambda at: MIB * (at + 8), counter=counter))
    assert (finding.device, finding.certainty, finding.bytes) == ("host", "proven", 45 * MIB)
    assert finding.bytes_per_step == pytest.approx(MIB, rel=1e-3)
    assert finding.mechanism == MECHANISMS[mechanism].mechanism
    assert finding.evidence == ["from census to census it grows by 1.0 MiB per step"]  # its counter sees more


@pytest.mark.parametrize(("short", "leaks"), [((33, 35, 37), True), ((57, 58, 59), False)])
def test_other_memory_may_come_in_parts_that_short_intervals_lack(short: Sequence[int], leaks: bool) -> None:
    """64 MiB for each 8 steps: none came from step 33 to 37, nor after step 56, where it may have ended."""
    censuses = (1, 9, 17, 25, *short, *((45, 57) if leaks else ()))
    found = judge(other_memory(lambda at: 64 * MIB * (at // 8), lambda at: 64 * MIB * (at // 8), censuses))
    assert bool(found.findings) is leaks


@pytest.mark.parametrize(("until", "leaks"), [(STEPS, True), (20, False)])
def test_other_memory_grows_on_while_its_counter_does(until: int, leaks: bool) -> None:
    resident = [BASE + MIB * min(at, until) for at in range(1, STEPS + 1)]
    evidence = other_memory(
        lambda at: 2 * MIB * at, lambda at: 2 * MIB * at, (5, 10, 15, 20), values=resident
    )
    assert bool(judge(evidence).findings) is leaks


def test_other_memory_that_is_released_at_the_end_has_leaked() -> None:
    evidence = other_memory(lambda at: MIB * at, lambda at: MIB * at, (15, 30, 45, 58))
    position = TrainingPosition(step=STEPS)
    evidence.add(CensusSeen(position=position, between=False, other_memory={"host": (0, 0)}))
    assert the(evidence).bytes_per_step == pytest.approx(MIB)


@pytest.mark.parametrize("counter", ["host", "shared"])
@pytest.mark.parametrize(
    ("least", "most", "censuses", "fills"),
    [
        pytest.param(lambda at: MIB * (at - 60), lambda at: MIB * at, CENSUSES, True, id="60 MiB fill"),
        pytest.param(
            lambda at: MIB * min(at, 45), lambda at: MIB * min(at, 45), CENSUSES, False, id="it ended"
        ),
        pytest.param(lambda at: MIB * at, lambda at: MIB * at, CENSUSES[1:], True, id="two intervals"),
        pytest.param(lambda at: KIB * at, lambda at: KIB * at, CENSUSES, False, id="too little"),
        pytest.param(lambda at: MIB * max(0, at - 40), lambda at: MIB * at, CENSUSES, False, id="once"),
    ],
)
def test_other_memory_that_may_end_is_not_proven(
    least: Callable[[int], float],
    most: Callable[[int], float],
    censuses: Sequence[int],
    fills: bool,
    counter: str,
) -> None:
    """Of shared memory, what the counter certainly shows is suspected: it may have been mapped before."""
    found = judge(other_memory(least, most, censuses, counter)).findings
    assert [each.certainty for each in found] == ["suspected"] * (fills and counter == "shared")


def test_what_awaits_the_collector_is_no_native_growth() -> None:
    waiting = {"cpu": {"Node": 20 * MIB}}
    evidence = observed({"cpu": rising(MIB)}, censuses=CENSUSES, last={"waiting": waiting})
    judgment = judge(evidence)
    assert judgment.findings == []
    note = judgment.judged["cpu"].note
    assert note is not None and "Node" in note and "20.0 MiB" in note
    off = observed({"cpu": rising(MIB)}, censuses=CENSUSES, waiting=waiting, collector_off=True)
    assert the(off).device == "host"


@pytest.mark.parametrize(("waits_at_end", "leaks"), [("Node", 0), ("Model", 1)])
def test_at_the_end_only_what_waited_before_explains_growth(waits_at_end: str, leaks: int) -> None:
    """What functions had when they returned may have been kept until then, such as a leak."""
    last = {"between": False, "waiting": {"cpu": {waits_at_end: 20 * MIB}}}
    evidence = observed({"cpu": rising(MIB)}, censuses=CENSUSES, waiting={"cpu": {"Node": MIB}}, last=last)
    assert len(judge(evidence).findings) == leaks


@pytest.mark.parametrize("seed", range(40))
def test_garbage_that_the_collector_frees_now_and_then_leaves_a_limit(seed: int) -> None:
    frees = np.cumsum(np.random.default_rng(seed).integers(6, 20, 7))
    garbage = [
        300 * KIB * (step - max((int(free) for free in frees if free <= step), default=0))
        for step in range(41)
    ]
    evidence = Evidence()
    for step in range(1, 41):
        evidence.run["step"].read(step, {"cpu": BASE + garbage[step]})
    for step in (3, 16, 18, 22, 28, 40):
        waiting = {"cpu": {"Node": garbage[step]}}
        evidence.add(CensusSeen(position=TrainingPosition(step=step), totals=waiting["cpu"], waiting=waiting))
    evidence.add(Situation(position=TrainingPosition(step=40), readable={"cpu": True}))
    judgment = judge(evidence)
    assert judgment.findings == [] and judgment.judged["cpu"].detection_limit is not None
    assert not suspicion_of(evidence.main, attribute(evidence.main)).open


@pytest.mark.parametrize(
    ("nbytes", "off", "note"),
    [
        pytest.param(
            MIB, False, "1.0 MiB in garbage cycles of Node awaited the collector at step 15", id="much"
        ),
        pytest.param(MIB - 1, False, None, id="little"),
        pytest.param(MIB, True, None, id="it is a leak"),
    ],
)
def test_much_that_awaits_the_collector_is_noted(nbytes: int, off: bool, note: str | None) -> None:
    waiting = {"cpu": {"Node": nbytes, "Edge": 0}}
    evidence = observed({"cpu": rising(0)}, censuses=CENSUSES, waiting=waiting, collector_off=off)
    judged = judge(evidence).judged["cpu"]
    assert judged.note == note and judged.detection_limit is not None


def test_garbage_of_functions_that_have_returned_is_no_note() -> None:
    at_end = {"between": False, "waiting": {"cpu": {"Model": 30 * MIB}}}
    assert judge(observed({"cpu": rising(0)}, censuses=CENSUSES, last=at_end)).judged["cpu"].note is None


def test_native_growth_is_no_larger_than_what_is_in_use() -> None:
    evidence = observed({"cpu": rising(MIB)}, censuses=CENSUSES, situation={"used": {"host": 40 * MIB}})
    assert the(evidence).bytes == 40 * MIB


@pytest.mark.parametrize(("first", "last", "leaks"), [(0, 20 * MIB, 0), (20 * MIB, 20 * MIB, 1), (0, 0, 1)])
def test_native_holders_of_what_awaits_the_collector_are_no_leak(first: int, last: int, leaks: int) -> None:
    native = (PathSegment(SegmentKind.NATIVE, "Tensor"),)

    def found(at: int) -> Found:
        return [held(MIB * at, at, anchor=native, path=native)]

    evidence = observed(
        {"cpu": rising(MIB)}, found, CENSUSES,
        waiting={"cpu": {"Node": first}}, last={"waiting": {"cpu": {"Node": last}}},
    )  # fmt: skip
    assert len(judge(evidence).findings) == leaks


def test_garbage_that_was_there_before_explains_no_growth_and_asks_for_a_census() -> None:
    """An exception's traceback keeps a large tensor until the collector comes."""
    waiting = {"cpu": {"traceback": 100 * MIB}}
    evidence = observed({"cpu": rising(MIB)}, censuses=[3], waiting=waiting)
    assert suspicion_of(evidence.main, attribute(evidence.main)).open


CODE_COMES = [20 * MIB + at // 6 * MIB // 2 for at in range(STEPS)]
"""Generated code, which grows at every sixth step."""


@pytest.mark.parametrize(
    ("device", "memory", "fills"),
    [
        pytest.param("cpu", [BASE + code / 5 for code in CODE_COMES], True, id="grows with the code"),
        pytest.param("cpu", rising(MIB), False, id="grows far more"),
        pytest.param("cuda:0", [BASE + code / 5 for code in CODE_COMES], False, id="is not native"),
    ],
)
def test_a_cache_that_fills_with_generated_code_is_no_leak(
    device: str, memory: list[float], fills: bool
) -> None:
    judgment = judge(observed({device: memory, "code": CODE_COMES}, censuses=CENSUSES))
    assert (judgment.findings == []) is fills
    limit = judgment.judged[device].detection_limit
    assert (limit is not None) is fills


@pytest.mark.parametrize(
    ("vary", "code", "certainty"),
    [
        pytest.param(False, CODE_COMES, "proven", id="one shape"),
        pytest.param(True, [MIB] * STEPS, "suspected", id="several shapes"),
        pytest.param(None, CODE_COMES, "suspected", id="shapes unknown, new code comes"),
        pytest.param(None, [MIB] * STEPS, "proven", id="shapes unknown, no new code"),
    ],
)
def test_native_growth_is_doubted_while_caches_by_shape_may_fill(
    vary: bool | None, code: list[float], certainty: str
) -> None:
    counters = {"cpu": rising(MIB), "code": code}
    situation = {"shapes_vary": vary, "readable": {"cpu": True}}
    assert the(observed(counters, censuses=CENSUSES, situation=situation)).certainty == certainty


@pytest.mark.parametrize(
    ("last", "named"),
    [
        pytest.param({"profiled": True}, True, id="at every census"),
        pytest.param({"profiled": False}, False, id="not at the last one"),
        pytest.param({"profiled": False, "between": False}, True, id="stopped at the end"),
    ],
)
def test_a_profiler_that_was_on_explains_native_growth(last: dict[str, bool], named: bool) -> None:
    finding = the(observed({"cpu": rising(MIB)}, censuses=CENSUSES, profiled=True, last=last))
    assert (finding.mechanism == PROFILER.why) is named


def test_data_that_grows_is_host_memory() -> None:
    detail = {"allocated_at": "data.py:3 in load", "stored_at": "data.py:4 in load"}
    finding = the(observed(ELSEWHERE, lambda at: [data(at, 100 * KIB, **detail)], CENSUSES))
    assert (finding.device, finding.certainty, finding.holder_path) == ("host", "proven", items("rows"))
    assert (finding.bytes, finding.bytes_per_step) == (6000 * KIB, 100 * KIB)
    assert (finding.allocated_at, finding.stored_at) == (detail["allocated_at"], detail["stored_at"])


def test_suspected_data_is_not_reported_over_time() -> None:
    def found(at: int) -> Found:
        return [data(at, 100 * KIB)]

    assert the(observed(ELSEWHERE, found, (20, 40, 60))).certainty == "suspected"
    assert judge(observed(ELSEWHERE, found, (20, 40, 60), scale="second")).findings == []


def test_objects_of_c_plus_plus_own_the_native_memory_that_grows_with_them() -> None:
    found = observed({"cpu": rising(MIB)}, lambda at: [data(at, 100, native="torch._C.Engine")], CENSUSES)
    finding = the(found)
    assert (finding.device, finding.holder_path) == ("host", items("rows"))
    assert finding.bytes_per_step == pytest.approx(MIB, rel=1e-2)


def test_shared_memory_is_judged_by_its_own_counter() -> None:
    shared = keeping(detail=GroupDetail(shared=True))
    finding = the(observed({"cpu": rising(0), "shared": rising(MIB)}, shared, CENSUSES))
    assert (finding.certainty, finding.bytes_per_step) == ("proven", pytest.approx(MIB, rel=1e-3))
    assert judge(observed({"cpu": rising(0), "shared": rising(0)}, shared, CENSUSES)).findings == []


def test_the_fastest_leak_is_first_and_small_suspicions_beside_it_are_left_out() -> None:
    def found(at: int) -> Found:
        return [
            held(MIB * at, at, name="slow", number=1),
            held(20 * MIB * at, at, name="fast", number=2),
            held(MIB * at, at, name="doubtful", number=3, replaced=True),
        ]

    findings = judge(observed(ELSEWHERE, found, CENSUSES)).findings
    assert [finding.holder_path for finding in findings] == [items("fast"), items("slow")]


@pytest.mark.parametrize(
    ("rate", "device", "kept"),
    [
        pytest.param(100_000, "cpu", True, id="a tenth of all"),
        pytest.param(99_999, "cpu", False, id="less than a tenth of all"),
        pytest.param(1, "cuda:0", True, id="in other memory"),
    ],
)
def test_suspicions_are_left_out_beside_much_larger_proven_leaks(rate: int, device: str, kept: bool) -> None:
    proven = [a_leak(items(name), each) for name, each in (("a", 600_000), ("b", 400_000))]
    doubtful = a_leak(items("c"), rate, device=device, certainty="suspected")
    assert worth_reporting([*proven, doubtful]) == [*proven, *([doubtful] if kept else [])]


# --- how certain, and why not -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "censuses", "reason"),
    [
        pytest.param(keeping(), (20, 40, 60), "too seldom", id="few"),
        pytest.param(keeping(replaced=True), CENSUSES, "replaced", id="replaced"),
        pytest.param(
            lambda at: [held(MIB * at * (120 - at), at)], CENSUSES, "more and more slowly", id="slows"
        ),
    ],
)
def test_a_suspicion_states_its_reason(
    found: Callable[[int], Found], censuses: Sequence[int], reason: str
) -> None:
    finding = the(observed(ELSEWHERE, found, censuses))
    assert finding.certainty == "suspected"
    assert any(line.startswith("suspected only: ") and reason in line for line in finding.evidence)


def test_a_proof_has_no_reason_to_doubt() -> None:
    assert not any("suspected" in line for line in the(leaking()).evidence)


@pytest.mark.parametrize("censuses", [(20, 40), (20, 40, 50, 56)], ids=["the last", "with pauses"])
def test_one_rise_that_no_counter_shows_is_not_reported(censuses: Sequence[int]) -> None:
    def loaded(at: int) -> Found:
        return [held(MIB * min(at, 40), min(at, 40))]

    def imported(at: int) -> Found:
        return [data(1000 * min(at, 40), entry_bytes=700)]

    for found in (loaded, imported):
        assert judge(observed(ELSEWHERE, found, censuses)).findings == []


# --- rates and projections ----------------------------------------------------------------------------------


def test_rates_are_for_a_step_and_each_of_its_backwards() -> None:
    evidence = observed({"cpu": rising(MIB)}, keeping(), CENSUSES, per_step=4)
    assert rates(the(evidence)) == (MIB, MIB // 4, None)


def test_rates_without_steps_are_for_backwards_or_seconds() -> None:
    backwards = observed({"cpu": rising(MIB)}, keeping(), CENSUSES, scale="microbatch")
    assert rates(the(backwards)) == (None, MIB, None)
    seconds = observed({"cpu": rising(MIB)}, keeping(), CENSUSES, scale="second")
    assert rates(the(seconds)) == (None, None, MIB)


# --- from outside -------------------------------------------------------------------------------------------


def outside(device: str, values: Sequence[float], found: Callable[[int], Found] = lambda at: ()) -> Evidence:
    evidence = observed({device: values}, found, CENSUSES, scale="second")
    evidence.run["second"].outside = True
    return evidence


def test_from_outside_a_list_that_grows_with_its_counter_is_a_proven_leak() -> None:
    finding = the(outside("cpu", rising(MIB), keeping()))
    assert (finding.certainty, finding.holder_path, rates(finding)) == (
        "proven", items("kept"), (None, None, MIB),
    )  # fmt: skip


def test_censuses_prove_what_pages_show_uncertainly() -> None:
    """A process that takes its censuses itself needs room for the first ones."""
    values = [
        value + sum(room * MIB for room, at in zip((20, 20, 7), CENSUSES, strict=False) if number > at)
        for number, value in enumerate(rising(MIB / 2), 1)
    ]
    judgment = judge(outside("cpu", values, keeping(MIB / 2)))
    assert judgment.counters["cpu"].growth.state == "uncertain"
    (finding,) = judgment.findings
    assert (finding.certainty, finding.bytes_per_second) == ("proven", MIB // 2)


@pytest.mark.parametrize("rooms", [(20, 7, 27), (5, 15, 25), (3, 3, 20)])
def test_censuses_prove_what_fills_the_room_that_they_left(rooms: Sequence[int]) -> None:
    """Each census needs so many MiB for an instant, and malloc keeps their pages."""
    taken = dict(zip(CENSUSES, rooms, strict=False))
    needed = (value + MIB * taken.get(at, 0) for at, value in enumerate(rising(MIB / 2), 1))
    finding = the(outside("cpu", list(accumulate(needed, max)), keeping(MIB / 2)))
    assert (finding.certainty, finding.holder_path, finding.bytes_per_second) == (
        "proven", items("kept"), MIB // 2,
    )  # fmt: skip


@pytest.mark.parametrize(("device", "rate"), [("cpu", MIB), ("cuda:0", 1.25 * MIB)])
def test_from_outside_the_rate_of_a_list_is_its_own_and_not_that_of_pages(device: str, rate: float) -> None:
    finding = the(outside(device, rising(1.25 * MIB), keeping(device=device)))
    assert finding.bytes_per_second == pytest.approx(rate, rel=1e-3)


def test_from_outside_room_that_malloc_no_longer_leaves_is_no_bound_of_a_list() -> None:
    """For most of the time the pages grow by twice the list, then by the list alone."""
    values = [BASE + MIB * at + MIB * min(at, 0.6 * STEPS) for at in range(1, STEPS + 1)]
    leak = judge(outside("cpu", values, keeping())).findings[0]
    assert (leak.holder_path, leak.certainty) == (items("kept"), "proven")


@pytest.mark.parametrize(("device", "certainty"), [("cpu", "suspected"), ("cuda:0", "proven")])
def test_from_outside_ordinary_data_may_hold_what_grows_on_the_host(device: str, certainty: str) -> None:
    assert the(outside(device, rising(MIB))).certainty == certainty


def test_from_outside_the_cpu_is_judged_like_a_resident_set() -> None:
    """A counter of malloc would have shown 8 MiB."""
    values = rising(8 * MIB / STEPS)
    (judged,) = judge(outside("cpu", values)).judged.values()
    limit = judged.detection_limit
    assert limit is not None and limit.bytes * STEPS > policy_of("host").settles
    assert judge(observed({"cpu": values}, censuses=CENSUSES, scale="second")).findings != []


# --- within a step ------------------------------------------------------------------------------------------


def within_step(values: list[float], *, stays: bool) -> Evidence:
    """A run of 20 steps, whose step 20 is followed from micro-batch to micro-batch."""
    per_step = len(values)
    evidence = observed(
        {"cuda:0": [BASE + (MIB * per_step * at if stays else 0) for at in range(1, 21)]},
        per_step=per_step,
    )
    for microbatch, value in enumerate(values, 1):
        evidence.of_step(20).read(microbatch, {"cuda:0": int(value)})
    for microbatch in (6, 12, 18, 24):
        at = TrainingPosition(
            step=20,
            microbatch=microbatch,
            backwards=20 * per_step + microbatch,
            microbatches_per_step=per_step,
        )
        evidence.add(
            CensusSeen(
                position=at, within_step=True, holders=[held(MIB * microbatch, microbatch, device="cuda:0")]
            )
        )
    evidence.add(
        Situation(
            position=at, limits={"cuda:0": 200 * MIB}, used={"cuda:0": 100 * MIB}, readable={"cuda:0": True}
        )
    )
    return evidence


def test_memory_that_grows_within_a_step_is_a_leak_of_its_micro_batches() -> None:
    finding = next(f for f in judge(within_step(rising(MIB, 24), stays=False)).findings if f.holder_path)
    assert (finding.certainty, finding.device, rates(finding)) == ("proven", "cuda:0", (None, MIB, None))
    assert finding.projection is not None
    assert (finding.projection.step, finding.projection.microbatches) == (None, 24 + 100)


def test_what_grows_within_each_step_and_stays_has_a_rate_per_step() -> None:
    finding = next(f for f in judge(within_step(rising(MIB, 24), stays=True)).findings if f.holder_path)
    assert rates(finding) == (24 * MIB, MIB, None)


def test_a_program_without_steps_is_compared_from_backward_to_backward_of_the_run() -> None:
    """The same micro-batches were also followed as those of a first step, which never ended."""
    evidence = leaking(scale="microbatch")
    for microbatch in (4, 6, 7, 8):
        evidence.of_step(0).read(microbatch, {"cpu": BASE + MIB * microbatch})
        evidence.add(
            CensusSeen(
                position=TrainingPosition(backwards=microbatch, microbatch=microbatch), within_step=True,
                holders=[held(MIB * microbatch, microbatch)],
            )
        )  # fmt: skip
    finding = the(evidence)
    assert finding.step is None and rates(finding) == (None, MIB, None)
    assert any("backwards 15, 30, 45, 60" in line for line in finding.evidence)


def test_a_cache_that_fills_within_one_step_is_cleared_by_the_next() -> None:
    evidence = within_step(rising(MIB, 24), stays=False)
    for microbatch in range(1, 25):
        evidence.of_step(21).read(microbatch, {"cuda:0": BASE})
    assert judge(evidence).findings == []


@pytest.mark.parametrize(
    ("scale", "expected"),
    [("step", {"step": 160}), ("microbatch", {"backward": 160}), ("second", None)],
)
def test_memory_is_projected_to_run_out_on_the_scale_of_its_growth(
    scale: Any, expected: dict[str, int] | None
) -> None:
    """100 MiB are left after position 60, and 1 MiB is lost at each."""
    situation = {"limits": {"cuda:0": GIB}, "used": {"cuda:0": GIB - 100 * MIB}}
    finding = the(leaking(device="cuda:0", scale=scale, situation=situation))
    if expected is None:
        assert finding.projection is None
        return
    assert finding.projection is not None
    known = msgspec.structs.asdict(finding.projection)
    assert {
        name: known[name] for name in ("step", "backward", "microbatches") if known[name] is not None
    } == {name: pytest.approx(at, abs=1) for name, at in expected.items()}


def test_parts_of_one_leak_are_projected_once() -> None:
    """Two entries of each dict keep half of what the counter shows: 100 MiB last for 100 steps."""

    def found(at: int) -> Found:
        paths = [(*items("kept"), PathSegment(SegmentKind.ITEM, f"'{name}'")) for name in "ab"]
        return [
            held(MIB * at / 2, at, device="cuda:0", anchor=path, path=path, number=number)
            for number, path in enumerate(paths)
        ]

    situation = {"limits": {"cuda:0": GIB}, "used": {"cuda:0": GIB - 100 * MIB}}
    finding = the(observed({"cuda:0": rising(MIB)}, found, CENSUSES, situation=situation))
    assert finding.projection is not None and finding.projection.step == pytest.approx(60 + 100, abs=1)


def test_parts_of_entries_that_are_found_at_another_place_each_time_belong_to_the_leak() -> None:
    """An entry has a state, and a model to which two ways of the same length lead."""

    def found(at: int) -> Found:
        way = ("fit", "test")[at // 15 % 2]
        parts = [(1, "state"), (2 + at // 15, way)]
        paths = [
            (number, (*items("kept"), PathSegment(SegmentKind.ATTRIBUTE, name))) for number, name in parts
        ]
        return [held(MIB * at, at, anchor=path, path=path, number=number) for number, path in paths]

    finding = the(observed({"cpu": rising(2 * MIB)}, found, CENSUSES))
    assert finding.bytes_per_step == pytest.approx(2 * MIB)
    assert finding.bytes == 2 * 60 * MIB


def test_memory_runs_out_as_fast_as_pages_are_taken() -> None:
    """Between what lives, malloc keeps room that nothing fits into: 400 MiB last for 100 steps, not 400."""
    counters = {"cpu": rising(MIB), "host": rising(4 * MIB)}
    situation = {"limits": {"cpu": GIB}, "used": {"cpu": GIB - 400 * MIB}}
    finding = the(observed(counters, keeping(MIB), CENSUSES, situation=situation))
    assert finding.bytes_per_step == MIB
    assert finding.projection is not None and finding.projection.step == pytest.approx(60 + 100, abs=1)


def test_without_a_limit_there_is_no_projection() -> None:
    assert the(leaking()).projection is None


# --- how small a leak would have been found -----------------------------------------------------------------


def test_a_flat_counter_has_a_limit() -> None:
    judged = judge(observed({"cpu": rising(0)})).judged["cpu"]
    assert (judged.scale, judged.points, judged.reason) == ("step", STEPS, None)
    assert judged.detection_limit is not None
    assert 0 < judged.detection_limit.bytes < MIB


def test_a_counter_that_leaks_has_no_limit_and_needs_no_reason() -> None:
    judged = judge(leaking()).judged["cpu"]
    assert (judged.detection_limit, judged.reason) == (None, None)


def test_growth_of_logs_and_bounded_containers_raises_the_limit() -> None:
    """It hides leaks that are slower."""
    bounded = GroupDetail(bound=100, entries=60)
    evidence = observed({"cpu": rising(MIB)}, keeping(detail=bounded), CENSUSES)
    judgment = judge(evidence)
    limit = judgment.judged["cpu"].detection_limit
    assert judgment.findings == []
    assert limit is not None and limit.bytes == pytest.approx(MIB, rel=0.01)


@pytest.mark.parametrize("explained", [0.6, 0.8])
def test_growth_of_which_too_little_is_harmless_has_no_limit(explained: float) -> None:
    bounded = keeping(explained * MIB, detail=GroupDetail(bound=100, entries=60))
    judged = judge(observed({"cpu": rising(MIB)}, bounded, CENSUSES)).judged["cpu"]
    assert (judged.detection_limit is not None) is (explained > 0.7)


@pytest.mark.parametrize(("length", "judged"), [(52, True), (80, False)])
def test_a_counter_that_was_not_read_for_long_has_no_limit(length: int, judged: bool) -> None:
    counters = {"cpu": rising(0, 40), "host": rising(0, length)}
    of = judge(observed(counters)).judged["cpu"]
    assert (of.detection_limit is not None, of.reason is None) == (judged, judged)


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        pytest.param(observed({"cpu": rising(0, 1)}), "1 step is too few", id="one step"),
        pytest.param(observed({"cpu": rising(0, 5)}), "5 steps are too few", id="few steps"),
        pytest.param(observed({"cpu": rising(0, 5)}, scale="microbatch"), "5 backwards are", id="backwards"),
        pytest.param(observed({"cpu": rising(0, 2)}, scale="second"), "no step was seen", id="over time"),
        pytest.param(
            observed({"cpu": rising(0), "cuda:0": rising(0, 20)}, situation={"readable": {"cuda:0": True}}),
            "not read after step 20",
            id="unread",
        ),
        pytest.param(observed({}, situation={"readable": {"cpu": False}}), "no counter", id="unreadable"),
        pytest.param(
            observed({"cpu": [BASE + 7 * GIB * (at * 7919 % 13) for at in range(40)]}),
            "moves too much",
            id="restless",
        ),
    ],
)
def test_what_is_not_judged_has_a_reason(evidence: Evidence, words: str) -> None:
    (judged,) = judge(evidence).judged.values()
    assert judged.detection_limit is None
    assert judged.reason is not None and words in judged.reason


def test_limits_are_left_out_if_they_are_not_wanted() -> None:
    assert judge(leaking(), limits=False).judged == {}


# --- records ------------------------------------------------------------------------------------------------

FOUND_THAT_DAY = Finding(kind="leak", device="cuda:0", holder="that day", bytes_per_step=7)
OTHER_KIND = Finding(kind="fragmentation", device="cuda:0")
DEATH = Finding(kind="out_of_memory", device="cuda:0")


def recorded(evidence: Evidence, end: End | None) -> RankRecord:
    """A record that has what was observed."""
    lines: list[Any] = list(evidence.run["step"].new_readings(last=True))
    lines += [*evidence.run["step"].censuses, evidence.situation]
    record = RankRecord(Path("rank-00003.jsonl"), Start(rank=3), evidence=lines, end=end)
    record.final_findings = [FOUND_THAT_DAY, OTHER_KIND, DEATH] if end else []
    record.interim_findings = [] if end else [FOUND_THAT_DAY, OTHER_KIND, DEATH]
    return record


def growth_of(record: RankRecord) -> list[Finding]:
    return [finding for finding in record.findings if finding.kind == "leak"]


@pytest.mark.parametrize("end", [End(verdict="clean", steps=STEPS), None], ids=["ended", "killed"])
def test_a_record_is_judged_as_the_run_was(end: End | None) -> None:
    live = judge(leaking())
    (leak,) = growth_of(judged_again(recorded(leaking(), end)))
    assert leak.rank == 3
    assert leak == msgspec.structs.replace(live.findings[0], rank=3)


@pytest.mark.parametrize("end", [End(verdict="clean", steps=STEPS), None], ids=["ended", "killed"])
def test_findings_of_other_kinds_stay_and_a_death_comes_first(end: End | None) -> None:
    again = judged_again(recorded(leaking(), end))
    assert [finding.kind for finding in again.findings] == ["out_of_memory", "leak", "fragmentation"]


def test_limits_are_judged_again() -> None:
    again = judged_again(recorded(observed({"cpu": rising(0)}), End(verdict="clean", steps=STEPS)))
    assert again.end is not None and again.end.judged is not None
    assert again.end.judged["cpu"].detection_limit is not None


def test_a_record_of_the_first_version_stays_as_it_is() -> None:
    record = recorded(leaking(), End(verdict="leak"))
    record.evidence = []
    assert judged_again(record) is record


@pytest.mark.parametrize("kept", range(6))
def test_a_cut_record_is_judged_from_what_is_there(kept: int) -> None:
    """Readings alone, then one census more each time."""
    record = recorded(leaking(), None)
    record.evidence = record.evidence[: 1 + kept]
    growth = growth_of(judged_again(record))
    with_holder = [finding for finding in growth if finding.holder_path == items("kept")]
    assert bool(with_holder) is (kept >= 2)


def test_judging_needs_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
from memtriage.diagnose.growth.evidence import Evidence
from memtriage.diagnose.growth.judgment import judge
evidence = Evidence()
for at in range(1, 61):
    evidence.run["step"].read(at, {"cpu": (100 + at) << 20})
print(judge(evidence).leaks[0].kind)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "leak\n"
