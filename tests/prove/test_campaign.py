"""Running what is to come: in order, once each, and on from where it stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memtriage.prove import campaign as module
from memtriage.prove.campaign import Campaign, TerminationRequested, termination_raises
from memtriage.prove.schedule import schedule
from memtriage.prove.state import ComparisonState
from memtriage.prove.table import TrialsError
from memtriage.prove.trial import TrialEnd, read_end
from memtriage.prove.trials import Trials, Variant
from support.trials import parsed, trials_of, write_trial


class Runner:
    """Stands for `run_trial`: writes what a trial would have left."""

    def __init__(self, state: ComparisonState, *, failing: str = "", stop_after: int = 99) -> None:
        self.ran: list[tuple[int, str]] = []
        self._state = state
        self._failing = failing
        self._stop_after = stop_after

    def __call__(
        self, trials: Trials, variant: Variant, number: int, settings: dict[str, str], folder: Path
    ) -> TrialEnd:
        if len(self.ran) == self._stop_after:
            raise KeyboardInterrupt
        self.ran.append((number, variant.name))
        if variant.name in self._failing:
            write_trial(self._state, variant.name, number, outcome="crashed", error="it broke")
        else:
            write_trial(self._state, variant.name, number, [1.0] * 3)
        end = read_end(folder)
        assert end is not None
        return end


@pytest.fixture
def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[tuple[int, str]], list[str]]]:
    """Runs the trials of variants in one directory; returns which ran, and the lines of progress."""

    def run(*names: str, failing: str = "", stop_after: int = 99) -> tuple[list[tuple[int, str]], list[str]]:
        trials = trials_of(tmp_path, *names)
        state = ComparisonState(tmp_path / "out", trials)
        runner, said = Runner(state, failing=failing, stop_after=stop_after), list[str]()
        monkeypatch.setattr(module, "run_trial", runner)
        with suppress(KeyboardInterrupt):
            Campaign(trials, state, said.append).run()
            assert len(runner.ran) < stop_after
        return runner.ran, said

    return run


def test_all_trials_run_in_order(ran: Callable[..., Any]) -> None:
    trials, said = ran("a", "b", "c")
    assert trials == schedule(["a", "b", "c"], 3)
    assert said[0] == "trial 1 of 9: a (round 1)"
    assert said[1] == "  a (round 1): 2 steps of 1.000 s; took 10 s"
    assert said[2] == "trial 2 of 9: c (round 1), about 1 min 20 s for the 8 left"


def test_an_interrupted_run_goes_on(ran: Callable[..., Any]) -> None:
    first, _ = ran("a", "b", stop_after=2)
    second, said = ran("a", "b")
    assert said[0].startswith("trial 3 of 6: ")
    assert (len(first), first + second) == (2, schedule(["a", "b"], 3))
    assert ran("a", "b") == ([], [])


def test_a_variant_that_keeps_failing_is_given_up(ran: Callable[..., Any]) -> None:
    trials, said = ran("a", "b", failing="b")
    assert sorted(name for _, name in trials) == ["a", "a", "a", "b", "b"]
    assert "  b (round 1): crashed: it broke; took 10 s" in said
    assert "  b failed 2 times in a row: not tried again" in said


def test_a_script_that_fails_in_every_variant_is_tried_once_in_each(ran: Callable[..., Any]) -> None:
    trials, said = ran("a", "b", failing="ab")
    assert sorted(name for _, name in trials) == ["a", "b"]
    assert said[-1] == "  every variant failed: no more trials are run"


def test_a_script_that_is_edited_meanwhile_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text("pass")
    text = '[trials]\nscript = "job.py"\nwarmup = 1\nrepeats = 2\n[[variant]]\nname = "a"\n'
    trials = parsed(text, tmp_path)
    state = ComparisonState(tmp_path / "out", trials)
    runner = Runner(state)

    def edited(*args: Any) -> TrialEnd:
        end = runner(*args)
        (tmp_path / "job.py").write_text("print()")
        return end

    monkeypatch.setattr(module, "run_trial", edited)
    with pytest.raises(TrialsError, match="script's content"):
        Campaign(trials, state, print).run()
    assert runner.ran == [(0, "a")]


def test_termination_is_an_exception_while_trials_run() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminationRequested) as caught, termination_raises():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
