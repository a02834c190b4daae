"""What the records and the log of a trial say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memtriage.model.marks import Mark
from memtriage.prove.command import record_directory
from memtriage.prove.reading import read_trial, read_values
from memtriage.store.records import End, Start
from memtriage.store.writer import RankWriter
from support.trials import MIB, trials_of, write_rank


def test_steps_after_the_warm_up(tmp_path: Path) -> None:
    write_rank(tmp_path, [5.0, 1.0, 1.2, 1.1], [(MIB * n, 2 * MIB * n) for n in (9, 1, 3, 2)])
    trial = read_trial(trials_of(tmp_path, "a"), tmp_path)
    assert trial.problem is None
    assert trial.steps == pytest.approx([1.0, 1.2, 1.1])
    assert trial.figure("time_per_step") == pytest.approx(1.1)
    (rank,) = trial.ranks
    assert rank.at_mark["allocated"] == [MIB, 3 * MIB, 2 * MIB]  # the mark of the first step is warm-up
    assert trial.figure("allocated") == 3 * MIB
    assert trial.figure("reserved") == 6 * MIB
    assert trial.figure("host_rss") == 100 * MIB
    assert trial.figure("requested") is None
    assert trial.cuda
    assert trial.torch == "2.13.0"


def test_peaks_are_the_allocators_own_or_what_a_mark_saw(tmp_path: Path) -> None:
    memory = [(5 * MIB, 50 * MIB)] * 3
    write_rank(tmp_path, [1.0] * 3, memory, peak=70 * MIB)
    trial = read_trial(trials_of(tmp_path, "a"), tmp_path)
    assert trial.figure("peak_reserved") == 70 * MIB
    assert trial.figure("peak_host_rss") == 150 * MIB
    assert trial.figure("peak_allocated") == 5 * MIB
    # A program that resets its peaks before the end hides none of what its marks saw.
    other = tmp_path / "reset"
    other.mkdir()
    write_rank(other, [1.0] * 3, memory, peak=20 * MIB)
    assert read_trial(trials_of(tmp_path, "a"), other).figure("peak_reserved") == 50 * MIB


def test_the_slowest_rank_and_the_highest_rank_count(tmp_path: Path) -> None:
    write_rank(tmp_path, [1.0, 1.0, 3.0], [(4 * MIB, 8 * MIB)] * 3, rank=0, world_size=2)
    write_rank(tmp_path, [1.0, 2.0, 1.0], [(6 * MIB, 7 * MIB)] * 3, rank=1, world_size=2, device="cuda:1")
    trial = read_trial(trials_of(tmp_path, "a"), tmp_path)
    assert trial.steps == pytest.approx([2.0, 3.0])
    assert trial.figure("allocated") == 6 * MIB
    assert trial.figure("reserved") == 8 * MIB
    assert [rank.figure("allocated") for rank in trial.ranks] == [4 * MIB, 6 * MIB]


def test_a_mark_of_the_programs_own_can_end_a_step(tmp_path: Path) -> None:
    head = '[trials]\nmodule = "job"\nwarmup = 1\nstep = "after refit"\n'
    write_rank(tmp_path, [1.0] * 4, [(MIB, MIB)] * 4)
    trial = read_trial(trials_of(tmp_path, "a", head=head), tmp_path)
    assert trial.steps == pytest.approx([1.0] * 3)
    assert trial.ranks[0].at_mark["allocated"] == [MIB] * 3


def test_steps_that_a_long_run_left_out_are_counted(tmp_path: Path) -> None:
    path = record_directory(tmp_path) / "run" / "0" / "rank-00000.jsonl"
    with RankWriter(path) as writer:
        writer.write("start", Start(run_id="run"))
        for step, at in ((1, 1.0), (2, 2.0), (12, 22.0)):
            mark = Mark(name="step", step=step, microbatch=1, rank=None, time_s=at, device="cpu", allocated=7)
            writer.write("mark", mark)
    head = '[trials]\nmodule = "job"\nwarmup = 2\n'
    trial = read_trial(trials_of(tmp_path, "a", head=head), tmp_path)
    assert trial.steps == pytest.approx([2.0])
    assert trial.figure("allocated") == 7  # malloc's, where there is no CUDA
    assert not trial.cuda
    assert trial.figure("peak_reserved") is None


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ('[trials]\nmodule = "job"\nwarmup = 3\n', "completed 3 steps; with 3 of warm-up at least 4"),
        ('[trials]\nmodule = "job"\nstep = "iteration"\n', "no mark 'iteration' ends a step .*'after refit'"),
        ('[trials]\nmodule = "job"\nwarmup = 1\nmark = "gone"\n', "no mark 'gone' after the warm-up"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, head: str, said: str) -> None:
    write_rank(tmp_path, [1.0] * 3, [(MIB, MIB)] * 3)
    trial = read_trial(trials_of(tmp_path, "a", head=head), tmp_path)
    assert trial.problem is not None
    assert re.search(said, trial.problem)


def test_no_record_at_all(tmp_path: Path) -> None:
    trial = read_trial(trials_of(tmp_path, "a"), tmp_path)
    assert trial.problem is not None
    assert "no such file" in trial.problem
    assert trial.figure("time_per_step") is None


def test_a_record_that_was_cut_has_no_peaks_of_its_own(tmp_path: Path) -> None:
    write_rank(tmp_path, [1.0] * 3, [(MIB, 2 * MIB)] * 3)
    path = next(tmp_path.rglob("rank-*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    trial = read_trial(trials_of(tmp_path, "a"), tmp_path)
    assert trial.steps == pytest.approx([1.0, 1.0])
    assert trial.figure("peak_reserved") == 2 * MIB
    assert End(verdict="clean").peak_reserved == {}


def test_values_are_those_of_the_lowest_rank_that_prints_any() -> None:
    patterns = {"loss": re.compile(r"loss ([0-9.]+)"), "gone": re.compile("gone (.)")}
    lines = [
        "[default1]:loss 9",
        "[default0]:step 1 loss 1.5",
        "[default0]:loss 1.25\n",
        "loss",
        "[default1]:loss 8",
    ]
    assert read_values(lines, patterns) == {"loss": ["1.5", "1.25"], "gone": []}
    assert read_values(["loss 3", "loss 2"], patterns)["loss"] == ["3", "2"]
    assert read_values(["[trainer3]:loss 3"], patterns)["loss"] == ["3"]


def test_a_value_is_a_number_where_it_can_be_one(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", more="[values]\nloss = 'loss (\\S+)'\n")
    for text, figure in (("loss 3\nloss 2.5", 2.5), ("loss nan?", None), ("loss inf", None), ("", None)):
        (tmp_path / "log.txt").write_text(text)
        assert read_trial(trials, tmp_path).figure("loss") == figure


def test_steps_that_a_census_is_in_the_time_of_are_left_out(tmp_path: Path) -> None:
    """A census at the end of a step takes time of the next."""
    times = [1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 7.0, 1.0]
    write_rank(tmp_path, times, [(MIB, MIB)] * 8, censuses=[4, 6])
    trial = read_trial(trials_of(tmp_path, "a"), tmp_path)
    assert trial.steps == pytest.approx([1.0] * 5)


def test_a_census_of_any_rank_disturbs_all(tmp_path: Path) -> None:
    write_rank(tmp_path, [1.0, 1.0, 9.0, 1.0], [(MIB, MIB)] * 4, rank=0, world_size=2, censuses=[2])
    write_rank(tmp_path, [1.0, 1.0, 9.0, 1.0], [(MIB, MIB)] * 4, rank=1, world_size=2, device="cuda:1")
    assert read_trial(trials_of(tmp_path, "a"), tmp_path).steps == pytest.approx([1.0, 1.0])


def test_where_every_step_is_disturbed_all_are_measured(tmp_path: Path) -> None:
    write_rank(tmp_path, [1.0, 2.0], [(MIB, MIB)] * 2, censuses=[1, 2])
    assert read_trial(trials_of(tmp_path, "a"), tmp_path).steps == pytest.approx([2.0])
