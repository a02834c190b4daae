"""When to take a census: follows the counters from mark to mark, and suspicions to their end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from memtriage.account.census import View
from memtriage.diagnose.growth import (
    POLICY,
    Series,
    period_within_step,
    policy_for,
    suspects,
    went_on_within_step,
)
from memtriage.diagnose.judge import Scale
from memtriage.diagnose.leaks import CensusPoint, growth_between
from memtriage.session.investigation import Investigation, Investigator

BASELINE_STEP = 3
"""The first census, with the ledger, is taken at the end of this step: optimizer state exists by then."""
_GAP = 4
_MICROBATCH_FIRST = 4
_MICROBATCH_SECOND = 8
_TRIES_WITHIN_STEP = 3
_CENSUS_SHARE = 0.01
_VERIFY_AT_MOST_S = 30.0


@dataclass(frozen=True, slots=True)
class Clock:
    """Where a run stands.

    Attributes:
        step: completed optimizer steps.
        microbatch: completed backwards since the last step.
        usual_microbatches: micro-batches of the last whole step; 0 before there was one.
        now_s: seconds since the watch began.
    """

    step: int
    microbatch: int
    usual_microbatches: int
    now_s: float

    def position(self, scale: Scale) -> int:
        """The run's position on a scale."""
        if scale == "step":
            return self.step
        return self.microbatch if scale == "microbatch" else round(self.now_s)


class Follower:
    """Holds the series, decides on censuses, keeps what the investigations brought.

    One investigation at a time. Step against step: a first census at the suspicion, a second four steps on, a
    third, once, later; and all of that again when the run is twice as long and still grows. Micro-batch
    against micro-batch within a step: at the fourth and at the eighth, sooner in short steps. Where no steps
    are seen: by time-based marks, which mean nothing once there are steps (memory rises within a slow one).

    Attributes:
        series: (counter, mark name) to its values. Counters are devices, and `shared`: resident memory that
            is shared or mapped, in which malloc's counter has no part.
        done: investigations that came to their second census.
        baseline: the census at the end of step `BASELINE_STEP`.
    """

    def __init__(
        self,
        investigator: Investigator,
        look: Callable[[View], None],
        found: Callable[[], None],
    ) -> None:
        self.series: dict[tuple[str, str], Series] = {}
        self.done: list[Investigation] = []
        self.baseline: CensusPoint | None = None
        self._investigator = investigator
        self._look = look
        self._found = found
        self._within: dict[str, Series] = {}
        self._followed_within: list[tuple[int, Investigation]] = []
        self._period_of_last_step: int | None = None
        self._open: Investigation | None = None
        self._due = 0
        self._open_step = 0
        self._verify_at: int | None = None
        self._quiet_until_s: dict[Scale, float] = {}
        self._tries_within_step = 0
        self._training_seen = False

    def growing(self) -> dict[str, Series]:
        """Each device's counter at the end of steps, so far: copies."""
        return {
            counter: Series([*series.positions], [*series.values])
            for (counter, name), series in self.series.items()
            if name == "step" and counter != "shared"
        }

    def new_step(self) -> None:
        """The first micro-batch after an optimizer step is about to be marked."""
        self._period_of_last_step = self._period_within_step()
        self._within.clear()

    def follow(self, name: str, clock: Clock, values: dict[str, int]) -> None:
        """Takes the counters of a `step`, `backward` or `time` mark, and acts on what they tell."""
        if name == "time" and self._training_seen:
            return
        if name != "time" and not self._training_seen:
            self._training_seen = True
            self._forget_time()
        if name == "backward":
            for counter, value in values.items():
                self._within.setdefault(counter, Series()).add(clock.microbatch, value)
            self._follow_within_step(clock)
            return
        if name == "step":
            self._check_again_within_step(clock.step - 1)
        scale: Scale = "step" if name == "step" else "second"
        for counter, value in values.items():
            self.series.setdefault((counter, name), Series()).add(clock.position(scale), value)
        self._follow_series(name, scale, clock)

    def _forget_time(self) -> None:
        """Drops what time-based marks have told before the first step: loading and building a model grow."""
        if self._open is not None and self._open.scale == "second":
            self.abandon()
        self.series = {key: series for key, series in self.series.items() if key[1] != "time"}
        judged = len(self.done)
        self.done = [done for done in self.done if done.scale != "second"]
        if len(self.done) < judged:
            self._found()

    # --- within a step --------------------------------------------------------------------------------------

    def _follow_within_step(self, clock: Clock) -> None:
        if self._open is not None:
            if self._open.scale != "microbatch":
                return
            if clock.step > self._open_step:
                self.abandon()  # the step ended before its second census
                return
            if clock.microbatch < self._due:
                self._investigator.record(self._due - clock.microbatch)
                return
            if not self._fell_within_step(self._open.points[0].position):
                self._conclude(clock)
                return
            self.abandon()  # backwards of one micro-batch: the same instant of two has to be compared
        if not self._may_begin("microbatch", clock) or self._known("microbatch"):
            return
        if self._tries_within_step >= _TRIES_WITHIN_STEP:
            return
        usual = clock.usual_microbatches
        if 0 < usual < _MICROBATCH_SECOND:
            # Steps too short to see a rise and still take two censuses are told by the step before.
            period = self._period_of_last_step or 1
            first, second = usual - max(1, (usual - max(2, usual // 2)) // period) * period, usual
        else:
            period, first, second = 1, _MICROBATCH_FIRST, _MICROBATCH_SECOND
        if clock.microbatch < first:
            return
        if first >= _MICROBATCH_FIRST or self._period_of_last_step is None:
            risen = self._period_within_step()
            if risen is None:
                return
            period = risen
        if usual and clock.microbatch + max(2, period) > usual:
            return
        self._tries_within_step += 1
        # At the same instant of a later micro-batch, however many backwards one has.
        ahead = max(2, second - clock.microbatch)
        self._begin("microbatch", clock, clock.microbatch + math.ceil(ahead / period) * period)
        if self._open is not None:
            self._open.period = period

    def _fell_within_step(self, since: int) -> bool:
        """Whether no counter stayed at or above what it was at a backward of this step."""
        fell = []
        for series in self._within.values():
            before = [v for p, v in zip(series.positions, series.values, strict=True) if p <= since][-1:]
            fell.append(min(series.after(since).values, default=0) < before[0] if before else True)
        return all(fell)

    def _period_within_step(self) -> int | None:
        found = [period_within_step(s.values, policy_for(key)) for key, s in self._within.items()]
        return min((period for period in found if period is not None), default=None)

    def _check_again_within_step(self, step: int) -> None:
        """At the end of a step: clears what had grown within it, or within an earlier one, and stopped."""
        for followed_in, investigation in self._followed_within:
            since = investigation.points[-1].position if followed_in == step else POLICY.microbatch_warm_up
            for growth in investigation.growths():
                series = self._within.get(growth.group.device)
                if series is not None and went_on_within_step(series, since, growth.rate) is False:
                    investigation.stopped.add(growth.key)

    # --- from step to step, or by time ----------------------------------------------------------------------

    def _follow_series(self, name: str, scale: Scale, clock: Clock) -> None:
        position = clock.position(scale)
        if self._open is not None:
            if self._open.scale != scale:
                return
            if position >= self._due:
                latest = self._open
                self._conclude(clock)
                self._clear_earlier(latest)
            else:
                self._investigator.record(self._due - position)
            return
        if self._verify_at is not None and scale == "step" and position >= self._verify_at:
            self._verify(position)
            return
        if scale == "step" and position == BASELINE_STEP and self.baseline is None:
            self.baseline = self._investigator.census(position, self._look)
            return
        suspected = [
            key
            for key, series in self.series.items()
            if key[1] == name and suspects(series, policy_for(key[0]))
        ]
        if suspected and self._may_begin(scale, clock) and not self._known(scale, position):
            self._begin(scale, clock, position + (_GAP if scale == "step" else 2 * _GAP))

    def _may_begin(self, scale: Scale, clock: Clock) -> bool:
        return clock.now_s >= self._quiet_until_s.get(scale, 0.0)

    def _known(self, scale: Scale, position: int = 0) -> bool:
        """Whether a leak on this scale is known already: following it again would tell nothing new.

        When the run is twice as long it may be another that grows by now.
        """
        return any(
            done.scale == scale and position < 2 * done.points[-1].position and done.growths()
            for done in self.done
        )

    def _clear_earlier(self, latest: Investigation) -> None:
        """Clears what an earlier investigation saw grow and this one did not: a cache that has filled."""
        growing = {growth.key for growth in growth_between(latest.points[0], latest.points[-1])}
        for done in self.done:
            if done is not latest and done.scale == latest.scale:
                done.stopped.update(growth.key for growth in done.growths() if growth.key not in growing)

    # --- investigations -------------------------------------------------------------------------------------

    def _begin(self, scale: Scale, clock: Clock, due: int) -> None:
        self._due, self._open_step = due, clock.step
        self._open = self._investigator.begin(scale, clock.position(scale))
        self._investigator.record(due - clock.position(scale))
        self._open.baseline = self.baseline if scale == "step" else None

    def _conclude(self, clock: Clock, frames: Sequence[FrameType] | None = None) -> CensusPoint:
        investigation, self._open = self._open, None
        assert investigation is not None
        position = clock.position(investigation.scale)
        # Inside a failing allocation the ledger of that instant is wanted too.
        also = None if frames is None else self._look
        point = self._investigator.conclude(investigation, position, also, frames)
        self.done = [*self.done, investigation][-8:]
        if investigation.scale == "microbatch":
            self._followed_within.append((self._open_step, investigation))
        if investigation.growths() or investigation.host:
            if investigation.scale == "step":
                first, second = investigation.points[0].position, point.position
                self._verify_at = second + 2 * (second - first)
            self._found()
        else:
            # After a false alarm, none of this kind until censuses are a hundredth of the time again.
            self._quiet_until_s[investigation.scale] = self._investigator.seconds / _CENSUS_SHARE / 4
        return point

    def _verify(self, position: int) -> None:
        """A third census, once: what fills to a bound has stopped by now, what leaks has not."""
        self._verify_at = None
        investigation = next(done for done in reversed(self.done) if done.scale == "step")
        if self._investigator.seconds > _VERIFY_AT_MOST_S or position <= investigation.points[-1].position:
            return
        investigation.points.append(self._investigator.census(position, self._look))
        self._found()

    def interrupted(self, clock: Clock, frames: Sequence[FrameType]) -> CensusPoint:
        """A census in the middle of what failed; ends an investigation that was under way.

        Args:
            clock: where the run stands.
            frames: of the error, innermost first; empty inside the failing allocation.
        """
        if self._open is not None:
            return self._conclude(clock, frames)
        return self._investigator.census(clock.step, self._look, frames)

    def end(self, clock: Clock, frames: Sequence[FrameType] | None = None) -> None:
        """The program ended: a suspicion under way is concluded by what is still alive.

        Args:
            clock: where the run stands.
            frames: of the exception that ended it, innermost first; None when it came to its end.
        """
        if self._open is None:
            return
        if clock.position(self._open.scale) > self._open.points[0].position:
            self._conclude(clock, frames)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Drops the investigation under way, if there is one."""
        if self._open is not None:
            self._open = None
            self._investigator.stop()
