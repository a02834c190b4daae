"""Growth in words: what evidence says of parts, and why a run was too short."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from memtriage.catalogue.growing import NATIVE
from memtriage.diagnose.causes import one_a_cause
from memtriage.diagnose.growth.attribution import Open
from memtriage.diagnose.growth.estimate import Growth
from memtriage.diagnose.growth.facts import Counted, JudgedDevice, Leak
from memtriage.model.findings import Projection
from memtriage.model.judged import DetectionLimit, Judged
from memtriage.report.growth_words import OPEN_SEGMENTS, findings_of, judged_in_words
from support.judged import a_leak
from support.paths import item, of_module

PARAMS = of_module("train", "params")
SHORT = JudgedDevice(scale="step", points=3, obstacle="few")
FLAT = JudgedDevice(scale="step", points=40, limit=DetectionLimit(512, "step"))


def part(number: int, **facts: object) -> Leak:
    return a_leak((*PARAMS, item(f"'{number}'")), **facts)  # type: ignore[arg-type]


def evidence(leak: Leak) -> list[str]:
    (finding,) = findings_of([leak])
    return finding.evidence


@pytest.mark.parametrize(
    ("count", "more"), [pytest.param(4, "", id="all are listed"), pytest.param(6, "; 2 more", id="some")]
)
def test_evidence_lists_the_fastest_parts_and_counts_the_others(count: int, more: str) -> None:
    (leak,) = one_a_cause([part(n, rates={"second": 9 - n}) for n in range(count)])
    first = "; ".join(f"{9 - n} B per second at train.params['{n}']" for n in range(4))
    assert evidence(leak)[0] == f"the sum of: {first}{more}"


def test_the_evidence_of_one_part_that_is_as_certain_is_given() -> None:
    reasons = {0: ("few",), 1: (), 2: ("few",)}
    of = {n: Counted(f"counter {n}", Growth("growing"), 0, why) for n, why in reasons.items()}
    parts = [
        part(0, rate=50, certainty="suspected", shown_by=of[0]),
        part(1, rate=40, certainty="proven", shown_by=of[1]),
        part(2, rate=30, certainty="suspected", shown_by=of[2]),
    ]
    (leak,) = one_a_cause(parts)
    first, shown = evidence(leak)
    assert first.startswith("the sum of: 40 B per step at train.params['1']; 50 B per step at")
    assert shown.startswith("the first of these: the counter of counter 1 rises")


def test_each_reason_why_growth_is_only_suspected_has_words() -> None:
    reasons = get_args(Open)
    leak = part(0, certainty="suspected", shown_by=Counted("cpu", Growth("growing"), 0, reasons))
    said = [line for line in evidence(leak) if line.startswith("suspected only: ")]
    assert len(set(said)) == len(reasons)


def test_memory_of_several_parts_is_full_once() -> None:
    ends = Projection(device="cpu", limit=1000, step=300)
    (whole,) = one_a_cause([part(n, rate=10, step=100, projection=ends) for n in range(2)])
    leak = replace(whole, projection=ends)
    assert [line for line in evidence(leak) if "is full" in line] == [str(leak.projection)]


def test_a_process_that_could_not_be_read_says_why() -> None:
    unread = a_leak(None, cause="not read", unread="ptrace_scope is 2; run memtriage with sudo")
    (finding,) = findings_of([unread])
    assert finding.mechanism.endswith(": ptrace_scope is 2; run memtriage with sudo")


def test_segments_of_a_queue_are_not_blamed_on_native_code() -> None:
    (finding,) = findings_of([a_leak(None, cause="shared memory", process="/dev/shm")])
    assert finding.holder == OPEN_SEGMENTS and finding.fix is not None and "Queue(maxsize" in finding.fix


def test_growth_of_native_code_names_the_calls_that_are_known_to_grow() -> None:
    (finding,) = findings_of([a_leak(rate=300_000, device="host")])
    assert finding.fix is not None and "GPU" not in finding.mechanism
    assert all(f"Where {calls}, {change}." in finding.fix for calls, change in NATIVE.items())
    assert "csr @ csr" in finding.fix and "ONEDNN_PRIMITIVE_CACHE_CAPACITY" in finding.fix


def test_growth_of_native_code_on_a_gpu_names_no_calls_of_the_host() -> None:
    (finding,) = findings_of([a_leak(rate=300_000, device="cuda:0")])
    assert "GPU memory" in finding.mechanism and "csr @ csr" not in str(finding.fix)


def test_native_memory_of_entries_adds_its_evidence() -> None:
    entries = part(1, rate=90)
    counter = Counted("cpu", Growth("growing", 1, 1, 1), 0)
    native = part(1, rate=7, device="host", shown_by=counter)
    assert evidence(*one_a_cause([entries, native])) == [*evidence(entries), *evidence(native)]


@pytest.mark.parametrize(
    ("failed", "steps", "torch", "expected"),
    [
        (True, 0, True, "the script failed before its first step"),
        (True, 3, True, "the script failed after 3 steps: 3 steps are too few, 12 are needed"),
        (False, 0, False, "torch was not imported: 3 steps are too few, 12 are needed"),
        (False, 3, True, "3 steps are too few, 12 are needed"),
        (False, 3, False, "3 steps are too few, 12 are needed"),  # counted by `memtriage.step()`
    ],
)
def test_a_short_run_says_how_it_came_to_be_short(
    failed: bool, steps: int, torch: bool, expected: str
) -> None:
    judged = {"cpu": SHORT, "cuda:0": FLAT}
    said = judged_in_words(judged, script_failed=failed, steps=steps, torch=torch)
    assert said["cpu"].reason == expected
    assert said["cuda:0"] == Judged(scale="step", points=40, detection_limit=DetectionLimit(512, "step"))


def test_what_was_long_enough_keeps_its_reason() -> None:
    restless = JudgedDevice(scale="step", points=30, obstacle="restless")
    judged = {"cpu": restless, "cuda:0": JudgedDevice(obstacle="no counter")}
    assert judged_in_words(judged, script_failed=True, steps=30, torch=False) == judged_in_words(judged)
