"""The words of a run's report: the sentence after the verdict, limits and ledger rows."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.diagnose.ranks.merge import RunContext
from memtriage.model.findings import Finding, FindingKind, Projection, Verdict
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale
from memtriage.model.ledger import LedgerRow
from memtriage.model.report import RankCount, RunReport
from memtriage.report.findings import fold
from memtriage.report.run.words import (
    facts,
    ledger_rows,
    ledger_summary,
    notes,
    sentence,
    stated_limit,
)

MIB = 1 << 20


def found(kind: FindingKind = "leak", **given: Any) -> Finding:
    return Finding(kind=kind, **{"device": "cuda:0", "holder": "losses[*]", **given})


def report(
    verdict: Verdict = "leak",
    *findings: Finding,
    ranks: tuple[int, int] = (1, 1),
    steps: int = 12,
    **given: Any,
) -> RunReport:
    return RunReport(
        verdict=verdict, steps=steps, findings=list(findings), marks=[], ledger={},
        ranks=RankCount(seen=ranks[0], of=ranks[1]), **given,
    )  # fmt: skip


def said(run: RunReport, context: RunContext | None = None, *runs_out_in: int | None) -> str:
    left = runs_out_in or (None,) * len(run.findings)
    return sentence(run, context or RunContext(), fold(run.findings, left))


# --- the sentence -------------------------------------------------------------------------------------------


def test_a_leak_is_its_amount_and_when_memory_is_full() -> None:
    one = found(bytes_per_step=MIB, bytes=9 * MIB)
    assert said(report("leak", one)) == "1.0 MiB per step on cuda:0"
    assert said(report("leak", one), None, 40) == "1.0 MiB per step on cuda:0, out of memory in 40 steps"
    more = [found(holder=name, bytes_per_step=5) for name in ("b", "c")]
    assert said(report("leak", one, more[0])) == "1.0 MiB per step on cuda:0; 1 more leak below"
    assert said(report("leak", one, *more)) == "1.0 MiB per step on cuda:0; 2 more leaks below"
    suspected = found(holder="d", bytes_per_step=5, certainty="suspected")
    assert said(report("leak", one, suspected)) == "1.0 MiB per step on cuda:0"


def test_a_leak_verdict_without_a_leak_points_to_the_findings() -> None:
    assert said(report("leak", found(certainty="suspected", bytes_per_step=5))) == "see below"


@pytest.mark.parametrize(
    ("kind", "words"),
    [("residue", "4.0 MiB not released on cuda:0"),
     ("fragmentation", "4.0 MiB reserved beyond the peak on cuda:0")],
)  # fmt: skip
def test_residue_and_fragmentation_are_their_size(kind: Any, words: str) -> None:
    assert said(report(kind, found(bytes_per_step=1), found(kind, bytes=4 * MIB, holder="b"))) == words
    assert said(report(kind)) == "see below"


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (found("out_of_memory", step=7, phase="backward", bytes=2 * MIB),
         "cuda:0 at step 7, in backward: 2.0 MiB asked for"),
        (found("out_of_memory", step=0), "cuda:0 at step 0"),
        (found("out_of_memory", device="host"), "host"),
        (found("out_of_memory", certainty="suspected"), "the script died for lack of memory"),
    ],
)  # fmt: skip
def test_a_death_is_where_and_what_was_asked_for(finding: Finding, words: str) -> None:
    assert said(report("out_of_memory", finding)) == words
    leak = found(bytes_per_step=MIB)
    assert said(report("out_of_memory", finding, leak)) == f"{words}; leaking 1.0 MiB per step"


def test_who_was_killed() -> None:
    assert said(report("killed")) == "the process is gone without writing an end, after 12 steps"
    limit = found("host_limit", device="host")
    assert said(report("killed", limit, ranks=(3, 4), steps=1), RunContext(killed=[1, 2])) == (
        "2 of 3 ranks are gone without writing an end, after 1 step; host memory was at its limit"
    )
    assert said(report("error")) == "memtriage could not judge this run"


def test_a_clean_run_says_what_would_have_been_found_and_what_needs_action() -> None:
    assert said(report("clean")) == "no leak, residue or fragmentation found in 12 steps"
    judged = {
        "cuda:0": Judged(
            scale="step", points=30, detection_limit=DetectionLimit(2048, "step"), note="one note"
        )
    }
    limit, note = said(report("clean", judged=judged)).split("; ")
    assert "2.0 KiB" in limit and note == "one note"


def test_three_findings_that_need_action_are_named_and_the_rest_counted() -> None:
    kinds: tuple[FindingKind, ...] = (
        "worker_copy_on_write", "malloc_retention", "host_limit", "shared_memory", "pinned_rounding",
    )  # fmt: skip
    several = [found(kind, device="host", bytes=MIB if at else None) for at, kind in enumerate(kinds)]
    nothing = "no leak, residue or fragmentation found in 12 steps"
    three = "workers un-share memory; memory kept by malloc: 1.0 MiB; host memory at its limit: 1.0 MiB"
    assert said(report("clean", *several[:3])) == f"{nothing}; {three}"
    assert said(report("clean", *several[:4])) == f"{nothing}; {three}; 1 more finding below"
    assert said(report("clean", *several)) == f"{nothing}; {three}; 2 more findings below"
    assert said(report("clean", found(certainty="suspected"))) == nothing


@pytest.mark.parametrize(("step", "when"), [(None, "at the longest batch"), (1234, "at step 1,234")])
def test_an_error_that_is_still_to_come_is_announced(step: int | None, when: str) -> None:
    ahead = found(
        "out_of_memory", certainty="suspected", projection=Projection(device="cuda:0", limit=9, step=step)
    )
    assert said(report("clean", ahead)).endswith(f"12 steps; cuda:0 will be full {when}")
    died = found("out_of_memory", device="cuda:1", step=41)
    assert said(report("out_of_memory", ahead, died)) == "cuda:1 at step 41"


def test_why_a_run_is_not_judged() -> None:
    assert said(report("not_judged")) == "growth could not be judged"
    assert said(report("not_judged", judged={"cpu": Judged(reason="too short")})) == "too short"
    noted = {"cpu": Judged(reason="too restless", note="1.0 MiB in garbage cycles")}
    assert said(report("not_judged", judged=noted)) == "too restless; 1.0 MiB in garbage cycles"
    one_device = {"cpu": flat(512), "cuda:0": Judged(reason="no counter")}
    assert said(report("not_judged", judged=one_device)) == "cuda:0: no counter"
    assert said(report("not_judged"), RunContext(running=[0])) == "the run had not finished"
    context = RunContext(running=[1], killed=[2], missing=[3])
    assert said(report("not_judged", ranks=(3, 4)), context) == (
        "rank 1 had not finished; rank 2 wrote no end; no record of rank 3"
    )
    limit = found("host_limit", device="host", bytes=MIB)
    assert said(report("not_judged", limit)) == (
        "growth could not be judged; host memory at its limit: 1.0 MiB"
    )


# --- the rest -----------------------------------------------------------------------------------------------


def test_facts_of_a_run_are_short() -> None:
    context = RunContext(argv=["train.py", "--lr", "1"], duration_s=90.0)
    assert facts(report(steps=1200), context) == ["train.py --lr 1", "1,200 steps", "1 min 30 s"]
    assert facts(report(ranks=(3, 4)), RunContext()) == ["12 steps", "3 of 4 ranks"]
    assert facts(report(steps=0), context) == ["train.py --lr 1", "1 min 30 s"]


def row(name: str, nbytes: int) -> LedgerRow:
    return LedgerRow(row=name, bytes=nbytes)


def test_rows_below_a_hundredth_are_one() -> None:
    rows = [row("a", 9800), row("b", 100), row("c", 50), row("d", 50)]
    assert [(each.row, each.bytes) for each in ledger_rows(rows)] == [
        ("a", 9800), ("b", 100), ("others, each below 1 %", 100),
    ]  # fmt: skip
    one_small = [row("a", 9900), row("b", 90), row("c", 10000)]
    assert ledger_rows(one_small) == one_small
    negative = [row("a", 9000), row("b", -500), row("c", 1)]
    assert ledger_rows(negative) == negative


def test_a_ledger_has_its_step_where_there_is_one() -> None:
    assert ledger_summary(MIB, None) == "1.0 MiB in use"
    assert ledger_summary(MIB, 1234) == "1.0 MiB in use, ledger at step 1,234"
    assert ledger_summary(MIB, 1234, 1234) == "1.0 MiB in use, ledger at step 1,234"
    assert ledger_summary(MIB, 6, 1300) == "1.0 MiB in use, ledger at step 6 of 1,300"


def test_ranks_without_a_record_come_first_among_the_notes() -> None:
    assert notes(RunContext(notes=["a"])) == ["a"]
    assert notes(RunContext(notes=["a"], missing=[1, 2])) == ["no record of ranks 1, 2", "a"]


def flat(limit: int, scale: JudgedScale = "step") -> Judged:
    return Judged(scale=scale, points=40, detection_limit=DetectionLimit(limit, "step"))


def test_a_limit_in_words_rests_on_steps_backwards_or_time() -> None:
    assert stated_limit({"cpu": flat(1434)}, steps=312, seconds=9.0) == (
        "no growth above 1.4 KiB per step on cpu in 312 steps"
    )
    devices = {"cpu": flat(900)} | {f"cuda:{index}": flat(512) for index in range(3)}
    assert stated_limit(devices, steps=312, seconds=9.0) == (
        "no growth above 900 B per step on cpu and 512 B per step on cuda:0-2 in 312 steps"
    )
    assert stated_limit({"cpu": flat(1434, "microbatch")}, steps=0, seconds=9.0) == (
        "no growth above 1.4 KiB per step on cpu in 40 backwards"
    )
    slow = Judged(scale="time", points=40, detection_limit=DetectionLimit(2048, "second"))
    assert stated_limit({"cpu": slow}, steps=0, seconds=64.0) == (
        "no growth above 2.0 KiB per second on cpu in 1 min 04 s"
    )
    assert stated_limit({"cpu": slow}, steps=0, seconds=None) == (
        "no growth above 2.0 KiB per second on cpu in 40 readings"
    )
    assert stated_limit({"cpu": Judged(scale="step", points=3, reason="few")}, steps=3, seconds=9.0) is None
