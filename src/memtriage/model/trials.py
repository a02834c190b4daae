"""The result of A/B trials, as `memtriage compare --json` writes it (schema 1).

Sizes are bytes, times are seconds; None where there is no such figure.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from memtriage.model.difference import Difference

PHASE_VARIABLE: Final = "MEMTRIAGE_PHASE"
"""Environment by which a trial says whether `memtriage.phase` acts: with `off` it marks and logs only."""

TargetVerdict = Literal["met", "missed", "undecided"]
TrialsVerdict = Literal["met", "missed", "undecided", "no_targets"]
FailureKind = Literal["crashed", "out_of_memory", "killed", "timed_out", "no_figures"]


class Spread(msgspec.Struct, kw_only=True, frozen=True):
    """Where a median lies.

    Attributes:
        low, high: the interval.
        confidence: how often such an interval encloses the true median, from 0 to 1.
        basis: `trials`, or `steps` where there are too few trials: differences between processes are then
            not in it.
    """

    low: float
    high: float
    confidence: float
    basis: Literal["trials", "steps"]


class AgainstBaseline(msgspec.Struct, kw_only=True, frozen=True):
    """A figure against the baseline's.

    Attributes:
        ratio: how many times the baseline's it is; median over the rounds in which both finished.
        spread: of the ratio.
        within_noise: the interval holds 1: these trials show no difference. None without an interval.
    """

    ratio: float
    spread: Spread | None
    within_noise: bool | None


class Figure(msgspec.Struct, kw_only=True, frozen=True):
    """One metric of one variant.

    Attributes:
        value: median over the finished trials.
        lowest, highest: of the trials.
        spread: of the median.
        by_rank: median over the trials, for each rank; empty for times and values.
        differing_ranks: those that are far from the others' median.
        against_baseline: None for the baseline itself, and where it has no such figure.
    """

    value: float
    lowest: float
    highest: float
    spread: Spread | None = None
    by_rank: dict[int, float] = msgspec.field(default_factory=dict)
    differing_ranks: list[int] = msgspec.field(default_factory=list)
    against_baseline: AgainstBaseline | None = None


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """Trials of a variant that brought no figures, for one reason.

    Attributes:
        kind: what happened.
        rounds: in which rounds, from 0.
        error: what was said.
        log: the output of the first of them.
    """

    kind: FailureKind
    rounds: list[int]
    error: str
    log: str


class TrialRow(msgspec.Struct, kw_only=True, frozen=True):
    """One trial that has figures.

    Attributes:
        round: from 0.
        place: in the order of its round, from 0.
        seconds: how long the process took.
        host, devices: where it ran; `devices` is `CUDA_VISIBLE_DEVICES`.
        steps: seconds of each step after the warm-up.
        allocated, reserved: highest of the ranks at each occurrence of the mark after the warm-up.
    """

    round: int
    place: int
    seconds: float
    host: str
    devices: str | None
    steps: list[float]
    allocated: list[int | None]
    reserved: list[int | None]


class OutputValues(msgspec.Struct, kw_only=True, frozen=True):
    """A figure read from the output, over the trials of a variant.

    Attributes:
        count: values in the first finished trial.
        first, last: its first and last one, as they were written.
        same_in_all_trials: whether every finished trial printed the same; None with fewer than two.
        same_as_baseline: whether all of them are the baseline's, text for text; None where that cannot be
            said.
        first_difference: place (from 0) of the first one that differs from the baseline's.
    """

    count: int
    first: str | None
    last: str | None
    same_in_all_trials: bool | None
    same_as_baseline: bool | None
    first_difference: int | None = None


class VariantRow(msgspec.Struct, kw_only=True, frozen=True):
    """One variant.

    Attributes:
        name: its name.
        baseline: the others are compared with it.
        planned, finished, pending: numbers of trials: all, those with figures, those still to come.
        skipped: trials that are left out because it failed too often in a row.
        steps: steps after the warm-up, over all finished trials.
        figures: by metric, those that there are.
        values: by name.
        trials: the finished ones, by round.
        failures: the others, by reason.
        findings: what `memtriage run` found, in words, each once.
        difference: what makes the difference between its memory and the baseline's, in the first round that
            both finished; None for the baseline, and where there is no such round.
    """

    name: str
    baseline: bool
    planned: int
    finished: int
    pending: int
    skipped: int
    steps: int
    figures: dict[str, Figure]
    values: dict[str, OutputValues]
    trials: list[TrialRow]
    failures: list[Failure]
    findings: list[str]
    difference: Difference | None = None


class TargetRow(msgspec.Struct, kw_only=True, frozen=True):
    """A target and its verdict.

    Attributes:
        metric, variant: what is judged.
        sense: `at_most`, `at_least` or `equals`.
        limit_text: the limit as written; of `equals` the other variant.
        verdict: `undecided`: too few trials, or noise is larger than what is left to the limit.
        value: of time the variant's figure; of a counter at a mark the reading nearest to its limit, or
            furthest over it.
        limit: the limit that goes with `value`.
        spread: of time, `value` divided by `limit` over the rounds.
        why: the verdict in a sentence.
    """

    metric: str
    variant: str
    sense: Literal["at_most", "at_least", "equals"]
    limit_text: str
    verdict: TargetVerdict
    value: float | None = None
    limit: float | None = None
    spread: Spread | None = None
    why: str


class TrialsReport(msgspec.Struct, kw_only=True, frozen=True):
    """The comparison.

    Attributes:
        schema: version of this form.
        verdict: `missed` when a target is, else `undecided` when one is, else `met`.
        name: title.
        directory: where trials, records and logs are.
        baseline: name of that variant.
        mark: mark at which memory was read.
        step: mark that ends a step.
        warmup: steps left out of each trial.
        repeats: trials a variant, as planned.
        ranks: processes a trial.
        complete: no trial is still to come.
        device: `cuda`, or `cpu` where no trial used CUDA: `allocated` and `reserved` are malloc's then.
        variants: in the order of the file.
        targets: in the order of the file.
        notes: what has to be known to read the figures.
    """

    schema: int = 1
    verdict: TrialsVerdict
    name: str
    directory: str
    baseline: str
    mark: str
    step: str
    warmup: int
    repeats: int
    ranks: int
    complete: bool
    device: Literal["cuda", "cpu"]
    variants: list[VariantRow]
    targets: list[TargetRow]
    notes: list[str]
