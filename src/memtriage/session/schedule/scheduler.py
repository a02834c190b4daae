"""When to take a census: the marks of each kind go to the scheduler of their scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from memtriage.account.census import View
from memtriage.diagnose.growth import Series
from memtriage.diagnose.leaks import CensusPoint
from memtriage.model.position import TrainingPosition
from memtriage.session.investigation import Investigation, Investigator
from memtriage.session.schedule.investigations import Investigations
from memtriage.session.schedule.microbatch import MicrobatchScheduler
from memtriage.session.schedule.over_run import StepScheduler, TimeScheduler


class CensusScheduler:
    """Hands marks to the schedulers: of steps, of micro-batches within a step, of time.

    One investigation at a time, whatever its scale.

    Attributes:
        steps: the scheduler that follows counters from step to step, with their series.

    Args:
        investigator, look, found: as `Investigations` has them.
    """

    def __init__(
        self, investigator: Investigator, look: Callable[[View], None], found: Callable[[], None]
    ) -> None:
        self._investigations = Investigations(investigator, look, found)
        self.steps = StepScheduler(self._investigations)
        self._microbatches = MicrobatchScheduler(self._investigations)
        self._time = TimeScheduler(self._investigations)

    @property
    def done(self) -> list[Investigation]:
        """The investigations that came to their second census."""
        return self._investigations.done

    def growing(self) -> dict[str, Series]:
        """Each device's counter at the end of steps, so far: copies."""
        return {
            counter: Series([*series.positions], [*series.values])
            for counter, series in self.steps.series.items()
            if counter != "shared"
        }

    def at_mark(self, name: str, position: TrainingPosition, values: Mapping[str, int]) -> None:
        """Take the counters of a `step`, `backward` or `time` mark, and act on what they show.

        Args:
            name: of the mark.
            position: where training stands.
            values: bytes by counter; what could not be read is left out.
        """
        if name == "time":
            self._time.at_mark(position, values)
            return
        self._time.training_begins()
        if name == "backward":
            self._microbatches.at_mark(position, values)
        else:
            self._microbatches.step_completes(position)
            self.steps.at_mark(position, values)

    # --- the end --------------------------------------------------------------------------------------------

    def interrupted(self, position: TrainingPosition, frames: Sequence[FrameType]) -> CensusPoint:
        """Take a census in the middle of what failed; end an investigation that was under way.

        Args:
            position: where training stands.
            frames: of the error, innermost first; empty inside the failing allocation.
        """
        if self._investigations.open is not None:
            return self._investigations.conclude(position, frames)
        return self._investigations.census(position.step, frames)

    def end(self, position: TrainingPosition, frames: Sequence[FrameType] | None = None) -> None:
        """Conclude a suspicion under way by what is still alive when the program ended.

        Args:
            position: where training stands.
            frames: of the exception that ended it, innermost first; None when it came to its end.
        """
        under_way = self._investigations.open
        if under_way is None:
            return
        if position.on(under_way.scale) > under_way.points[0].position:
            self._investigations.conclude(position, frames)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Drop the investigation under way, if there is one."""
        self._investigations.abandon()
