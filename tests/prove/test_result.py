"""From a directory of trials to their report."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtriage.prove.result import make_report, pending
from memtriage.prove.state import ComparisonState
from support.trials import HEAD, MIB, trials_of, write_trial

LOSS = "[values]\nloss = 'loss ([0-9.]+)'\n"
TARGETS = """
[[target]]
metric = "time_per_step"
variant = "b"
at_most = "1.05 x a"
[[target]]
metric = "reserved"
variant = "b"
at_most = "1.1 x allocated + 5 MiB"
[[target]]
metric = "loss"
variant = "b"
equals = "a"
"""


def test_a_whole_comparison(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b", more=LOSS + TARGETS)
    state = ComparisonState(tmp_path / "out", trials)
    for number, level in enumerate((1.0, 1.2, 0.9)):
        write_trial(state, "a", number, [9.0, level, level], log="loss 2\nloss 1.5\n")
        memory = [(99 * MIB, 99 * MIB), (10 * MIB, 15 * MIB), (12 * MIB, 16 * MIB)]
        write_trial(state, "b", number, [9.0, 1.02 * level, 1.02 * level], memory, log="loss 2\nloss 1.5\n")
    report = make_report(trials, state)
    assert (report.verdict, report.complete, report.device) == ("met", True, "cuda")
    first, second = report.variants
    assert (first.baseline, first.finished, first.steps, first.pending) == (True, 3, 6, 0)
    time = second.figures["time_per_step"]
    assert time.value == pytest.approx(1.02)
    assert (time.lowest, time.highest) == (pytest.approx(0.918), pytest.approx(1.224))
    assert time.against_baseline is not None
    assert time.against_baseline.ratio == pytest.approx(1.02)
    assert time.against_baseline.within_noise is False
    assert time.against_baseline.spread is not None
    assert time.against_baseline.spread.confidence == 0.75
    assert first.figures["time_per_step"].against_baseline is None
    assert second.figures["allocated"].value == 12 * MIB
    assert second.figures["allocated"].by_rank == {0: 12 * MIB}
    assert second.figures["loss"].value == 1.5
    assert second.values["loss"].same_as_baseline is True
    assert second.values["loss"].same_in_all_trials is True
    assert [trial.place for trial in second.trials] == [1, 0, 1]
    assert second.trials[0].allocated == [10 * MIB, 12 * MIB]
    assert [target.verdict for target in report.targets] == ["met", "met", "met"]
    assert any("75 % confidence" in note for note in report.notes)


def test_a_variant_that_fails_is_a_row(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b", "c", more=TARGETS.split("[[target]]")[0])
    state = ComparisonState(tmp_path / "out", trials)
    for number in range(3):
        write_trial(state, "a", number, [1.0] * 3)
    for number in range(2):
        write_trial(state, "b", number, outcome="out_of_memory", error="OutOfMemoryError: tried 2 GiB")
    write_trial(state, "c", 0, [1.0])
    report = make_report(trials, state)
    failed = report.variants[1]
    assert (failed.finished, failed.skipped, failed.pending, failed.figures) == (0, 1, 0, {})
    (failure,) = failed.failures
    assert (failure.kind, failure.rounds) == ("out_of_memory", [0, 1])
    assert Path(failure.log).is_file()
    short = report.variants[2]
    assert (short.finished, short.pending) == (0, 2)
    assert short.failures[0].kind == "no_figures"
    assert "at least 2 are needed" in short.failures[0].error
    assert not report.complete
    assert report.verdict == "no_targets"
    assert short.failures[0].error.startswith("the process completed 1 step;")
    assert any("2 of 9 trials are still to come" in note for note in report.notes)


def test_nothing_has_run(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b", more=LOSS + TARGETS)
    report = make_report(trials, ComparisonState(tmp_path / "out", trials))
    assert (report.verdict, report.complete) == ("undecided", False)
    assert all(row.figures == {} and row.pending == 3 for row in report.variants)


def test_trials_under_other_conditions_are_noted(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b")
    state = ComparisonState(tmp_path / "out", trials)
    write_trial(state, "a", 0, [1.0] * 3, host="one", devices="0", started=100.0)
    write_trial(state, "b", 0, [1.0] * 3, host="one", devices="0", started=200.0)
    assert not any("different" in note for note in make_report(trials, state).notes)
    write_trial(state, "b", 0, [1.0] * 3, host="two", devices="1", started=200.0)
    notes = " ".join(make_report(trials, state).notes)
    assert "different machines (one, two)" in notes
    assert "different devices (CUDA_VISIBLE_DEVICES 0 | 1)" in notes


def test_values_that_differ(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b", more=LOSS)
    state = ComparisonState(tmp_path / "out", trials)
    write_trial(state, "a", 0, [1.0] * 3, log="loss 2\nloss 1\n")
    write_trial(state, "b", 0, [1.0] * 3, log="loss 2\nloss 1\n")
    write_trial(state, "b", 1, [1.0] * 3, log="loss 2\nloss 1.1\n")
    baseline, other = make_report(trials, state).variants
    assert baseline.values["loss"].same_as_baseline is None
    values = other.values["loss"]
    assert (values.same_in_all_trials, values.same_as_baseline, values.first_difference) == (False, False, 1)
    assert (values.first, values.last, values.count) == ("2", "1", 2)


def test_what_is_pending_leaves_out_what_was_given_up(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b")
    assert len(pending(trials, {})) == 6
    assert pending(trials, {(0, "a"): True, (1, "a"): True, (0, "b"): False}) == [(1, "b"), (2, "b")]
    assert len(pending(trials, {(0, "a"): True, (1, "a"): False})) == 4


def test_few_trials_say_that_their_intervals_are_over_steps(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b")
    state = ComparisonState(tmp_path / "out", trials)
    write_trial(state, "a", 0, [1.0, 1.0, 1.1, 0.9])
    write_trial(state, "b", 0, [1.0, 1.0, 1.1, 0.9])
    report = make_report(trials, state)
    against = report.variants[1].figures["time_per_step"].against_baseline
    assert against is not None and against.spread is not None
    assert (against.spread.basis, against.within_noise) == ("steps", True)
    assert any("over steps" in note for note in report.notes)
    memory = report.variants[1].figures["allocated"].against_baseline
    assert memory is not None
    assert (memory.spread, memory.within_noise) == (None, None)


def test_a_variant_that_has_not_run_says_nothing_of_the_number_of_trials(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b")
    state = ComparisonState(tmp_path / "out", trials)
    assert not any("over steps" in note for note in make_report(trials, state).notes)
    write_trial(state, "a", 0, [1.0] * 3)
    assert any("over steps" in note for note in make_report(trials, state).notes)


@pytest.mark.parametrize("rounds", [5, 6])
def test_six_trials_are_enough_for_the_confidence(tmp_path: Path, rounds: int) -> None:
    trials = trials_of(tmp_path, "a", "b", head=HEAD.replace("repeats = 3", f"repeats = {rounds}"))
    state = ComparisonState(tmp_path / "out", trials)
    for number in range(rounds):
        for name in "ab":
            write_trial(state, name, number, [1.0, 1.0, 1.1, 0.9])
    notes = make_report(trials, state).notes
    assert any("95 % takes at least 6 trials" in note for note in notes) is (rounds < 6)


@pytest.mark.parametrize(
    ("sizes", "differing"),
    [
        ((500, 500, 900, 500), [2]),
        ((500, 500, 900, 500, 100), [2, 4]),
        ((500, 500, 900, 900), []),  # two groups
        ((500, 500, 900, 100), []),
        ((500,), []),
        ((500, 900), [1]),
        ((900, 500), [0]),
        # Alike up to 64 MiB, or a tenth.
        ((100, 164, 100), []),
        ((100, 164 + 1 / MIB, 100), [1]),
        ((100, 36 - 1 / MIB, 100), [1]),
        ((1000, 1100, 1000), []),
        ((1000, 1100 + 1 / MIB, 1000), [1]),
    ],
)
def test_ranks_stand_out_while_they_are_fewer_than_half(
    tmp_path: Path, sizes: tuple[float, ...], differing: list[int]
) -> None:
    trials = trials_of(tmp_path, "a", head=HEAD + f"ranks = {len(sizes)}\n")
    state = ComparisonState(tmp_path / "out", trials)
    nbytes = {rank: int(size * MIB) for rank, size in enumerate(sizes)}
    ranks = {rank: [(size, 2000 * MIB)] * 3 for rank, size in nbytes.items()}
    write_trial(state, "a", 0, [1.0] * 3, ranks=ranks)
    figures = make_report(trials, state).variants[0].figures
    assert figures["allocated"].by_rank == nbytes
    assert figures["allocated"].differing_ranks == differing
    assert figures["reserved"].differing_ranks == []


def test_what_makes_the_difference_is_read_from_the_first_round_that_both_finished(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b")
    state = ComparisonState(tmp_path / "out", trials)
    for number, (name, highest) in enumerate([("a", 50), ("a", 100), ("a", 100)]):
        write_trial(state, name, number, [1.0] * 2, [(highest * MIB, 200 * MIB)] * 2)
    for number in (1, 2):
        write_trial(state, "b", number, [1.0] * 2, [(150 * MIB, 200 * MIB)] * 2)
    first, second = make_report(trials, state).variants
    assert first.difference is None
    assert second.difference is not None
    assert (second.difference.before, second.difference.after) == (100 * MIB, 150 * MIB)
    assert second.difference.difference == sum(row.difference for row in second.difference.rows)
