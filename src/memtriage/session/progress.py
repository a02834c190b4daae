"""Counts backwards and steps as the hooks report them."""

from __future__ import annotations

import threading
import time

from msgspec.structs import replace

from memtriage.model.position import TrainingPosition


class TrainingProgress:
    """Turns what the hooks report into a `TrainingPosition`.

    Attributes:
        position: as of the last event. Replaced as a whole, so that any thread may read it; its `time_s` is
            0, which `now` fills in.
        thread: the thread that ran the last backward.
    """

    def __init__(self) -> None:
        self.position = TrainingPosition()
        self.thread: int | None = None
        self._lock = threading.RLock()  # steps and backwards of several threads may come at once
        self._started = time.perf_counter()
        self._manual_steps = False
        self._stepped_inside = False

    def elapsed(self) -> float:
        """Seconds since the watch began."""
        return time.perf_counter() - self._started

    def now(self) -> TrainingPosition:
        """The position, with the time."""
        return replace(self.position, time_s=self.elapsed())

    def backward_begins(self) -> None:
        with self._lock:
            self.position = replace(self.position, phase="backward")
        self.thread = threading.get_ident()

    def backward_fails(self) -> None:
        """A backward raised: it counts nothing."""
        with self._lock:
            self.position = replace(self.position, phase="forward")

    def backward_completes(self) -> None:
        with self._lock:
            before = self.position
            self.position = replace(
                before,
                phase="forward",
                backwards=before.backwards + 1,
                microbatch=1 if before.at_step_end else before.microbatch + 1,
                at_step_end=False,
            )

    def optimizer_begins(self) -> None:
        with self._lock:
            self.position = replace(self.position, phase="optimizer")

    def optimizer_ends(self, inside_backward: bool) -> bool:
        """Return whether this completes a step now. Several optimizers between two backwards make one step.

        A step inside a backward is complete when the backward is: see `take_step_inside`.
        """
        with self._lock:
            self.position = replace(self.position, phase="backward" if inside_backward else "forward")
        if self._manual_steps:
            return False
        if inside_backward:
            self._stepped_inside = True
            return False
        return not self.position.at_step_end

    def take_step_inside(self) -> bool:
        """Return whether an optimizer stepped inside the backward that just completed; says so once."""
        stepped, self._stepped_inside = self._stepped_inside, False
        return stepped

    def user_step(self) -> bool:
        """Return whether the program's word completes a step. From the first call on, hooks count none."""
        counted_by_hook = self.position.at_step_end and not self._manual_steps
        self._manual_steps = True
        return not counted_by_hook

    def step_completes(self) -> None:
        with self._lock:
            before = self.position
            self.position = replace(
                before, step=before.step + 1, microbatches_per_step=before.microbatch, at_step_end=True
            )
