"""Findings of several ranks as one, and what every report says of each."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.model.findings import Certainty, Finding, FindingKind
from memtriage.model.report import RankCount, RunReport
from memtriage.model.units import MIB
from memtriage.report.findings import fold


def found(kind: FindingKind = "leak", **given: Any) -> Finding:
    return Finding(kind=kind, **{"device": "cuda:0", "holder": "losses[*]", **given})


def of_ranks(seen: int, of: int) -> RunReport:
    ranks = RankCount(seen=seen, of=of)
    return RunReport(verdict="leak", steps=12, findings=[], marks=[], ledger={}, ranks=ranks)


def test_facts_are_those_that_are_known_the_holder_first() -> None:
    finding = found(
        also_held_by=["a", "b"], stored_at="a.py:1", allocated_at="a.py:2", bytes=MIB, bytes_per_step=1024,
        bytes_per_microbatch=512, step=7, mechanism="kept", fix="clear it", evidence=["rose"],
    )  # fmt: skip
    (group,) = fold([finding], [9])
    assert [tuple(fact) for fact in group.facts(" - ", 12)] == [
        ("kept alive by", ["losses[*]"], "path"),
        ("also kept alive by", ["a", "b"], "path"),
        ("stored at", ["a.py:1"], "path"),
        ("allocated at", ["a.py:2"], "path"),
        ("size at step 7", ["1.0 MiB - 512 B per micro-batch"], "words"),
        ("runs out", ["in 9 steps, at step 21"], "words"),
        ("why", ["kept"], "words"),
        ("fix", ["clear it"], "fix"),
        ("evidence", ["rose"], "list"),
    ]
    assert "runs out" not in [fact.label for fact in group.facts(" - ")]


def test_an_unknown_holder_is_said_of_growth_alone() -> None:
    leak, residue = fold([found(holder=None), found("residue", holder=None)], [None, None])
    assert [tuple(fact) for fact in leak.facts(" ")] == [("kept alive by", ["n/a"], "path")]
    assert residue.facts(" ") == []


def test_what_is_the_same_on_several_ranks_is_one() -> None:
    leaks = [found(rank=rank, device=f"cuda:{rank}", bytes_per_step=10 - rank) for rank in (0, 1)]
    other = found(rank=0, holder="cache[*]", bytes_per_step=3)
    again = found(rank=0, bytes_per_step=2)
    groups = fold([leaks[0], other, leaks[1], again], [50, None, 40, None])
    assert [(group.ranks, group.runs_out_in) for group in groups] == [([0, 1], 40), ([0], None), ([0], None)]
    assert groups[0].amount == "9 B to 10 B per step"
    assert groups[0].device == "cuda:0, 1"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "garbage_cycle"}, {"certainty": "suspected"}, {"device": "cpu"}, {"holder": "b"},
        {"allocated_at": "a.py:1"}, {"phase": "train"}, {"mechanism": "another"},
    ],
)  # fmt: skip
def test_what_differs_in_more_than_its_rank_is_two(change: dict[str, Any]) -> None:
    one, other = found(rank=0), found(**{"rank": 1, **change})
    assert len(fold([one, other], [None, None])) == 2


def test_findings_without_a_rank_stay_apart() -> None:
    assert len(fold([found(), found()], [None, None])) == 2


@pytest.mark.parametrize(
    ("ranks", "of", "seen", "where"),
    [
        ([None], 1, 1, ""),
        ([0], 1, 1, ""),
        ([2], 4, 4, ", rank 2 only"),
        ([0, 1, 2, 3], 4, 4, ", all 4 ranks"),
        ([0, 1, 2], 4, 3, ", all 3 ranks"),
        ([0, 1, 3], 8, 8, ", 3 of 8 ranks (0, 1, 3)"),
    ],
)
def test_a_title_says_on_which_ranks(ranks: list[int | None], of: int, seen: int, where: str) -> None:
    group, *rest = fold([found(rank=rank) for rank in ranks], [None] * len(ranks))
    assert group.title(of_ranks(seen, of)) == f"leak on cuda:0{where}" and not rest


def test_titles_of_suspicions_and_of_the_host() -> None:
    def title(finding: Finding) -> str:
        return fold([finding], [None])[0].title(of_ranks(1, 1))

    assert title(found(certainty="suspected")) == "suspected leak on cuda:0"
    assert title(found("host_limit", device="host")) == "host memory at its limit"


@pytest.mark.parametrize(
    ("kind", "certainty", "severe", "confirmed_by"),
    [
        ("leak", "proven", True, None),
        ("leak", "suspected", False, "run longer"),
        ("residue", None, False, None),
        ("out_of_memory", None, True, None),
        ("out_of_memory", "suspected", False, "run a step with this batch first"),
    ],
)
def test_what_is_severe_and_what_would_confirm_a_suspicion(
    kind: FindingKind, certainty: Certainty | None, severe: bool, confirmed_by: str | None
) -> None:
    (group,) = fold([found(kind, certainty=certainty)], [None])
    assert group.severe is severe
    assert (group.to_confirm or "").startswith(confirmed_by or "") and (group.to_confirm is None) == (
        confirmed_by is None
    )


@pytest.mark.parametrize(
    ("given", "amount", "label", "values"),
    [
        ({"bytes": 5}, "5 B", "", []),
        ({}, "", "", []),
        ({"bytes": 5, "bytes_per_step": 3, "step": 7}, "3 B per step", "size at step 7", ["5 B"]),
        ({"bytes": 5, "bytes_per_step": 3, "bytes_per_microbatch": 2, "step": 7, "bytes_step": 6},
         "3 B per step", "size at step 6", ["5 B", "2 B per micro-batch"]),
        ({"bytes_per_microbatch": 2, "step": 7}, "2 B per micro-batch", "size at step 7", []),
        ({"bytes": 5, "bytes_per_second": 3, "step": 0}, "3 B per second", "size", ["5 B"]),
        ({"bytes": 90, "event": "save", "bytes_per_event": 40, "bytes_per_step": 2, "step": 9},
         "40 B per save", "size at step 9", ["90 B", "2 B per step", "every 20 steps"]),
    ],
)  # fmt: skip
def test_the_rate_comes_first_and_then_what_has_piled_up(
    given: dict[str, Any], amount: str, label: str, values: list[str]
) -> None:
    (group,) = fold([found(**given)], [None])
    assert group.amount == amount
    assert group.piled_up == (label, values)


def test_a_finding_by_time_or_of_growth_has_no_step_of_detection() -> None:
    by_step, by_time, growth = (
        found(step=7),
        found(step=7, bytes_per_second=3),
        found(step=7, bytes_per_step=3),
    )
    assert "7" in fold([by_step], [None])[0].detected
    assert [fold([other], [None])[0].detected for other in (by_time, growth)] == ["", ""]


def test_evidence_is_that_of_the_first_rank_or_of_each() -> None:
    def evidence(kind: FindingKind, count: int) -> list[str]:
        each = [found(kind, rank=rank, evidence=[f"first {rank}", "second"]) for rank in range(count)]
        return fold(each, [None] * count)[0].evidence

    assert evidence("leak", 1) == ["first 0", "second"]
    assert evidence("leak", 3) == ["rank 0: first 0", "rank 0: second"]
    assert evidence("rank_differs", 3) == [f"rank {rank}: first {rank}" for rank in range(3)]
    assert evidence("rank_differs", 6) == [f"rank {rank}: first {rank}" for rank in range(6)]
    assert evidence("rank_differs", 8)[6:] == ["and 2 more ranks"]
