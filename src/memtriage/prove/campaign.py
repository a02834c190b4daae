"""Runs the trials that are still to come, one after the other, and says how far it is."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from memtriage.model.units import duration, measured_time
from memtriage.prove.limits import TIME
from memtriage.prove.reading import TrialReading, read_trial
from memtriage.prove.result import Trial, pending
from memtriage.prove.schedule import remaining_s
from memtriage.prove.state import ComparisonState
from memtriage.prove.trial import TrialEnd, run_trial
from memtriage.prove.trials import Trials

Say = Callable[[str], None]


class Campaign:
    """The trials of a file in a directory: which ended, which are to come."""

    def __init__(self, trials: Trials, state: ComparisonState, say: Say) -> None:
        self.trials = trials
        self.state = state
        self._say = say
        self._total = trials.repeats * len(trials.names)
        self._failed: dict[Trial, bool] = {}
        self._took: dict[str, list[float]] = {}
        for trial, end in state.ends().items():
            self._note(trial, end)

    @property
    def ended(self) -> int:
        """How many trials have ended."""
        return len(self._failed)

    def pending(self) -> list[Trial]:
        """Return the trials to come, in order."""
        return pending(self.trials, self._failed)

    def run(self) -> None:
        """Run all that is to come, one at a time.

        Raises:
            TrialsError: the script changed since trials ran.
            OSError: the directory cannot be written.
            KeyboardInterrupt: Ctrl-C. Nothing is left running, finished trials are kept.
        """
        variants = {variant.name: variant for variant in self.trials.variants}
        while to_come := self.pending():
            number, name = to_come[0]
            self.state.refuse_changes()
            left = remaining_s([variant for _, variant in to_come], self._took)
            # Fewer may come, when a variant is given up.
            eta = "" if left is None else f", about {duration(left)} for the {len(to_come)} left"
            self._say(f"trial {self.ended + 1} of {self._total}: {name} (round {number + 1}){eta}")
            settings = self.state.settings(name)
            folder = self.state.folder(name, number)
            self._ends(run_trial(self.trials, variants[name], number, settings, folder))

    def _ends(self, end: TrialEnd) -> None:
        """Take note of a trial that ended, and say how."""
        trial = (end.round, end.variant)
        reading = self._note(trial, end)
        if end.outcome != "finished":
            words = f"{end.outcome.replace('_', ' ')}: {end.error}"
        elif reading is None or reading.problem is not None:
            words = f"no figures: {'' if reading is None else reading.problem}"
        else:
            step = reading.figure(TIME) or 0.0
            words = f"{len(reading.steps)} steps of {measured_time(step)}"
        self._say(f"  {end.variant} (round {end.round + 1}): {words}; took {duration(end.seconds)}")
        if self._failed[trial] and all(name != end.variant for _, name in self.pending()):
            left = self.trials.repeats - sum(name == end.variant for _, name in self._failed)
            if not self.pending() and all(self._failed.values()):
                self._say("  every variant failed: no more trials are run")
            elif left:
                self._say(
                    f"  {end.variant} failed {self.trials.give_up_after} times in a row: not tried again"
                )

    def _note(self, trial: Trial, end: TrialEnd) -> TrialReading | None:
        reading = None
        if end.outcome == "finished":
            reading = read_trial(self.trials, self.state.folder(end.variant, end.round))
        self._failed[trial] = reading is None or reading.problem is not None
        self._took.setdefault(end.variant, []).append(end.seconds)
        return reading


class TerminationRequested(BaseException):
    """SIGTERM or SIGHUP came: to be handled as Ctrl-C is."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def termination_raises() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise `TerminationRequested` in the main thread."""

    def handler(signum: int, _: FrameType | None) -> None:
        raise TerminationRequested(signum)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
