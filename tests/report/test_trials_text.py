"""A comparison on the terminal, and its trials_text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtriage.model.difference import Difference
from memtriage.model.trials import (
    AgainstBaseline,
    Failure,
    Figure,
    OutputValues,
    Spread,
    TargetRow,
    TrialsReport,
    VariantRow,
)
from memtriage.prove.result import make_report
from memtriage.prove.state import ComparisonState
from memtriage.report import trials_text
from memtriage.report.trials_text import interval, render
from support.printed import printed
from support.trials import GIB, HEAD, MIB, MORE, trials_of, write_trial

SURE = Spread(low=0.98, high=1.013, confidence=0.9375, basis="trials")


def variant(**fields: Any) -> VariantRow:
    empty: dict[str, Any] = {
        "name": "fp8",
        "baseline": False,
        "planned": 3,
        "finished": 3,
        "pending": 0,
        "skipped": 0,
        "steps": 9,
        "figures": {},
        "values": {},
        "trials": [],
        "failures": [],
        "findings": [],
    }
    return VariantRow(**{**empty, **fields})


def made(**fields: Any) -> TrialsReport:
    usual: dict[str, Any] = {
        "verdict": "met",
        "name": "n",
        "directory": "d",
        "baseline": "bf16",
        "mark": "end",
        "step": "step",
        "warmup": 1,
        "repeats": 3,
        "ranks": 1,
        "complete": True,
        "device": "cuda",
        "variants": [variant(), variant(finished=1)],
        "targets": [],
        "notes": [],
    }
    return TrialsReport(**{**usual, **fields})


def target(verdict: str = "met", **fields: Any) -> TargetRow:
    usual: dict[str, Any] = {
        "metric": "peak_reserved",
        "variant": "fp8",
        "sense": "at_most",
        "limit_text": "2 MiB",
        "verdict": verdict,
        "why": "no trial finished",
    }
    return TargetRow(**{**usual, **fields})


def test_intervals_in_words() -> None:
    assert interval(SURE) == "0.980 to 1.013 (94 % confidence)"
    steps = Spread(low=0.98, high=0.99, confidence=0.95, basis="steps")
    assert interval(steps) == "0.980 to 0.990 (95 % confidence, over steps)"


def figure(value: float, lowest: float, highest: float, **fields: Any) -> Figure:
    return Figure(value=value, lowest=lowest, highest=highest, **fields)


@pytest.mark.parametrize(
    ("metric", "known", "column", "text", "below"),
    [
        ("time_per_step", figure(0.02, 0.0201, 0.0203), "time per step", "20.00 ms", "20.10-20.30 ms"),
        ("time_per_step", figure(1.0, 0.9, 1.1), "time per step", "1.000 s", "900.0 ms-1.100 s"),
        ("time_per_step", figure(1.0, 1.0, 1.0), "time per step", "1.000 s", ""),
        ("allocated", figure(3 * MIB, MIB, 2 * MIB, by_rank={0: 1}), "allocated", "3.0 MiB", "1.0-2.0 MiB"),
        ("peak_reserved", figure(MIB, MIB, MIB, by_rank={0: 1024, 3: MIB}), "peak reserved", "1.0 MiB",
         "1.0 KiB-1.0 MiB"),
    ],
)  # fmt: skip
def test_figures_and_their_spread(metric: str, known: Figure, column: str, text: str, below: str) -> None:
    shown = {cell.column: cell for cell in trials_text.cells(made(), variant(figures={metric: known}))}
    assert shown.pop(column) == (column, text, below)
    ratio = shown.pop("x bf16")
    assert ratio[1:] == ("-", "")
    assert {cell[1:] for cell in shown.values()} == {("n/a", "")}


@pytest.mark.parametrize(
    ("spread", "noise", "below"),
    [
        (SURE, True, "0.980-1.013\nwithin noise"),
        (SURE, False, "0.980-1.013"),
        (None, None, "no interval"),
    ],
)
def test_a_ratio_has_its_interval(spread: Spread | None, noise: bool | None, below: str) -> None:
    against = AgainstBaseline(ratio=1.25, spread=spread, within_noise=noise)
    time = figure(1.0, 1.0, 1.0, against_baseline=against)
    (_, ratio, *_) = trials_text.cells(made(), variant(figures={"time_per_step": time}))
    assert ratio == ("x bf16", "1.250 x", below)


def test_the_verdict_counts_targets() -> None:
    assert trials_text.sentence(made()) == "2 variants, no targets"
    judged = [target("missed"), target("met"), target("met"), target("undecided")]
    assert trials_text.sentence(made(targets=judged)) == "2 met, 1 missed, 1 undecided, of 4 targets"
    assert trials_text.sentence(made(targets=judged[:1])) == "1 missed, of 1 target"


def test_what_the_figures_rest_on() -> None:
    assert trials_text.facts(made()) == [
        "4 of 6 finished, interleaved",
        "steps end at mark 'step', without 1 warm-up step",
        "memory at mark 'end'",
        "compared with bf16",
    ]
    assert trials_text.facts(made(ranks=4))[1] == "4 ranks"
    assert trials_text.legend(made()).endswith("below a size: lowest and highest trial")
    assert trials_text.legend(made(ranks=4)).endswith("below a size: lowest and highest rank")


def test_ranks_that_stand_out_are_listed_with_the_others() -> None:
    apart = Figure(
        value=9 * MIB,
        lowest=MIB,
        highest=9 * MIB,
        by_rank={0: MIB, 1: 9 * MIB, 2: 2 * MIB, 3: 8 * MIB},
        differing_ranks=[1, 3],
    )
    alone = Figure(value=MIB, lowest=MIB, highest=MIB, by_rank={0: MIB, 1: 3 * MIB}, differing_ranks=[1])
    alike = Figure(value=MIB, lowest=MIB, highest=MIB, by_rank={0: MIB, 1: MIB})
    row = variant(figures={"allocated": apart, "reserved": alike, "peak_reserved": alone})
    assert trials_text.differing(made(), row) == [
        "fp8, allocated: ranks 1, 3 at 9.0 MiB, 8.0 MiB, others at 1.0 MiB - 2.0 MiB",
        "fp8, peak reserved: rank 1 at 3.0 MiB, others at 1.0 MiB",
    ]
    on_cpu = variant(figures={"peak_host_rss": alone, "peak_reserved": apart})
    assert trials_text.differing(made(device="cpu"), on_cpu) == [
        "fp8, peak resident: rank 1 at 3.0 MiB, others at 1.0 MiB"
    ]


def test_why_trials_have_no_figures() -> None:
    one = Failure(kind="out_of_memory", rounds=[0], error="tried 2 GiB", log="l")
    two = Failure(kind="timed_out", rounds=[1, 2], error="stopped after 9 s", log="l")
    row = variant(finished=1, failures=[one, two], skipped=1)
    assert trials_text.trial_counts(row) == "1 of 3 trials"
    assert trials_text.what_is_missing(row) == [
        "fp8: out of memory in round 1: tried 2 GiB",
        "fp8: timed out in rounds 2, 3: stopped after 9 s",
        "fp8: 1 trial left out after failures",
    ]


def output(**fields: Any) -> OutputValues:
    usual: dict[str, Any] = {"count": 3, "first": "2.5", "last": "1.5"}
    same = {"same_in_all_trials": None, "same_as_baseline": None}
    return OutputValues(**{**usual, **same, **fields})


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (output(count=0, first=None, last=None), "not printed"),
        (output(), "2.5 -> 1.5 (3 values)"),
        (output(count=1), "2.5 (1 value)"),
        (output(same_in_all_trials=True), "2.5 -> 1.5 (3 values)"),
        (output(same_in_all_trials=False), "2.5 -> 1.5 (3 values), differs between its own trials"),
        (output(same_as_baseline=True), "2.5 -> 1.5 (3 values), the same as bf16, value for value"),
        (output(same_as_baseline=False), "2.5 -> 1.5 (3 values), differs from bf16"),
        (
            output(same_as_baseline=False, first_difference=1),
            "2.5 -> 1.5 (3 values), differs from bf16 from value 2 on",
        ),
    ],
)
def test_the_course_of_a_value(read: OutputValues, said: str) -> None:
    assert trials_text.values(variant(values={"loss": read}), "loss", "bf16") == said


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (target(), "no trial finished"),
        (target(value=3.0), "no trial finished"),
        (target(value=MIB, limit=2 * MIB, why="below"), "1.0 MiB against 2.0 MiB; below"),
        (target(metric="host_pinned", value=MIB, limit=2 * MIB, why="w"), "1.0 MiB against 2.0 MiB; w"),
        (target(metric="time_per_step", value=0.02, limit=2.0, why="w"), "20.00 ms against 2.000 s; w"),
        (
            target(metric="loss", value=1.5, limit=2.0, spread=SURE, why="w"),
            "1.500 against 2.000, 0.980 to 1.013 (94 % confidence) of it; w",
        ),
    ],
)
def test_how_a_target_was_judged(judged: TargetRow, said: str) -> None:
    assert trials_text.target_result(judged) == said
    assert trials_text.target(judged) == f"fp8: {judged.metric} at most 2 MiB"


@pytest.mark.parametrize(("after", "told"), [(2 * MIB, True), (0, True), (MIB + 1, False)])
def test_why_a_variant_needs_another_amount_is_told_before_its_findings(after: int, told: bool) -> None:
    why = Difference(
        of="run",
        difference=after - MIB,
        summary="the sentence",
        rows=[],
        suspects=[],
        before=MIB,
        after=after,
        figures={},
    )
    rows = [variant(name="bf16", baseline=True), variant(difference=why, findings=["a leak"])]
    expected = ["fp8: the sentence"] if told else []
    assert trials_text.found(made(variants=rows)) == [*expected, "fp8: a leak"]


@pytest.fixture
def report(tmp_path: Path) -> TrialsReport:
    """Four variants on two ranks: of `fp8` one rank holds more, `fp8 + large` dies."""
    head = HEAD + 'ranks = 2\nname = "FP8 <refit>"\n'
    trials = trials_of(tmp_path, "bf16", "fp8", "fp8 + phase", "fp8 + large", more=MORE, head=head)
    state = ComparisonState(tmp_path / "out", trials)
    for number, level in enumerate((10.0, 10.4, 9.8)):
        for name, factor, first, second in (
            ("bf16", 1.2, (600 * MIB, 700 * MIB), (600 * MIB, 700 * MIB)),
            ("fp8", 1.0, (9 * GIB, 26 * GIB), (12 * GIB, 26 * GIB)),
            ("fp8 + phase", 1.004 if number else 0.999, (500 * MIB, 560 * MIB), (500 * MIB, 560 * MIB)),
        ):
            write_trial(
                state,
                name,
                number,
                [30.0, factor * level, 1.01 * factor * level],
                ranks={0: [first] * 3, 1: [second] * 3},
                log="loss 2.5\nloss 2.25\n",
            )
    for number in range(2):
        write_trial(state, "fp8 + large", number, outcome="out_of_memory", error="OutOfMemoryError: 2 GiB")
    return make_report(trials, state)


def text_of(report: TrialsReport, width: int, *, colors: bool = False) -> str:
    return printed(render, report, width=width, colors=colors)


@pytest.fixture
def noted(report: TrialsReport) -> TrialsReport:
    """With something in every part; a name too long for its column."""
    first, second, *others = report.variants
    long = msgspec.structs.replace(second, name="fp8 with a name that has no end at all")
    found = msgspec.structs.replace(first, findings=["2 leaks on cuda:0", "residue"])
    return msgspec.structs.replace(
        report, variants=[found, long, *others], notes=["rounds 1 and 2 overlapped", "the node was shared"]
    )


@pytest.mark.parametrize("width", [40, 60, 80, 81, 90, 200])
def test_the_report_fits(noted: TrialsReport, width: int) -> None:
    lines = text_of(noted, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("fp8 + phase" in line for line in lines)
    assert not any(line != line.rstrip() for line in lines)
