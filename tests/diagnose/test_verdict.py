from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.verdict import reasons_not_judged, verdict, weakest
from memtriage.model.findings import Finding, FindingKind
from memtriage.model.judged import DetectionLimit, Judged

KINDS = get_args(FindingKind)
FLAT = Judged(scale="step", points=30, detection_limit=DetectionLimit(1434, "step"))
GROWS = Judged(scale="step", points=30)
SHORT = Judged(scale="step", points=3, reason="3 steps are too few, 12 are needed")
NO_COUNTER = Judged(reason="no counter")


def findings(*kinds):
    return [Finding(kind=kind, device="cuda:0") for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        ((), "clean"),
        (("leak",), "leak"),
        (("garbage_cycle",), "leak"),
        (("residue",), "residue"),
        (("fragmentation",), "fragmentation"),
        (("fragmentation", "residue"), "residue"),
        (("fragmentation", "residue", "garbage_cycle"), "leak"),
        (("out_of_memory",), "clean"),  # caught and survived
        (("rank_differs", "host_limit", "pinned_rounding", "private_pool", "stream_pool"), "clean"),
    ],
)
def test_first_that_holds(kinds, word):
    assert verdict(findings(*kinds), False, {"cpu": FLAT}) == word


@given(st.lists(st.sampled_from(KINDS)), st.sampled_from([{}, {"cpu": FLAT}, {"cpu": SHORT}]))
def test_death_of_memory_outranks_all(kinds, judged):
    assert verdict(findings(*kinds), True, judged) == "out_of_memory"


@given(st.lists(st.sampled_from(KINDS)), st.randoms())
def test_the_order_of_findings_does_not_matter(kinds, random):
    shuffled = list(kinds)
    random.shuffle(shuffled)
    assert verdict(findings(*kinds), False, {"cpu": FLAT}) == verdict(
        findings(*shuffled), False, {"cpu": FLAT}
    )


@pytest.mark.parametrize(
    ("judged", "word"),
    [
        ({}, "not_judged"),
        ({"cpu": NO_COUNTER}, "not_judged"),
        ({"cpu": SHORT}, "not_judged"),
        ({"cpu": FLAT}, "clean"),
        ({"cpu": FLAT, "cuda:0": FLAT}, "clean"),
        ({"cpu": FLAT, "cuda:0": SHORT}, "not_judged"),
        ({"cpu": NO_COUNTER, "cuda:0": FLAT}, "clean"),  # what cannot be read is no reason against the rest
        ({"cpu": GROWS}, "not_judged"),  # no holder of it was found
    ],
)
def test_clean_rests_on_every_counter(judged, word):
    assert verdict([], False, judged) == word
    assert verdict(findings("leak"), False, judged) == "leak"


def suspicion(**fields):
    known = {"kind": "leak", "device": "cpu", "certainty": "suspected", "bytes_per_second": 2048}
    return Finding(**(known | fields))


def test_a_suspicion_is_no_leak_and_forbids_clean():
    assert verdict([suspicion()], False, {"cpu": FLAT}) == "not_judged"
    assert verdict([suspicion(), *findings("residue")], False, {"cpu": FLAT}) == "residue"
    assert verdict([suspicion(), suspicion(certainty="proven")], False, {}) == "leak"


def test_what_is_suspected_is_told_first_and_once_for_a_device():
    judged = {"cpu": GROWS, "cuda:0": SHORT, "cuda:1": SHORT}
    assert reasons_not_judged([suspicion(), suspicion()], judged) == [
        "suspected growth of 2.0 KiB per second on cpu; run longer to confirm",
        "cuda:0, 1: 3 steps are too few, 12 are needed",
    ]
    assert reasons_not_judged([suspicion(device="host")], {"cpu": GROWS}) == [
        "suspected growth of 2.0 KiB per second on host; run longer to confirm"
    ]


def test_growth_without_a_finding_is_a_reason():
    (reason,) = reasons_not_judged([], {"cpu": GROWS})
    assert reason.startswith("memory grows, and no holder of it was found")
    assert reasons_not_judged([], {"cpu": FLAT}) == []


def test_the_weakest_of_several_ranks_says_least():
    limits = (DetectionLimit(nbytes, "step") for nbytes in (512, 4096))
    lower, higher = (Judged(scale="step", points=40, detection_limit=limit) for limit in limits)
    assert weakest([lower, higher, FLAT]) == higher
    assert weakest([higher, GROWS, lower]) == GROWS
    assert weakest([higher, SHORT, GROWS]) == SHORT
