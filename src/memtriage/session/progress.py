"""Count backwards and steps as the hooks report them."""

from __future__ import annotations

from msgspec.structs import replace

from memtriage.model.position import TrainingPosition
from memtriage.process.stdlib import threading, time
from memtriage.session.step_pattern import StepPattern, Stepped, stepped


class TrainingProgress:
    """Turns what the hooks report into a `TrainingPosition`.

    Attributes:
        position: as of the last event. Replaced as a whole, so that any thread may read it. Its `time_s` is
            0; `now` fills it in.
        thread: the thread that ran the last backward.
        repeats: it calls modules in a loop, or computes gradients without a backward.
    """

    def __init__(self) -> None:
        self.position = TrainingPosition()
        self.thread: int | None = None
        self.repeats = False
        self._lock = threading.RLock()  # several threads may report steps and backwards at once
        self._started = time.perf_counter()
        self._manual_steps = self._runs_backward = False
        self._pattern = StepPattern()
        self._stepped_inside: list[Stepped] = []

    @property
    def trains(self) -> bool:
        """Whether a backward or an optimizer has begun, or a step was counted."""
        return self.position.step > 0 or self.position.phase != "setup"

    @property
    def works(self) -> bool:
        """Whether what the program does repeats. Until then it loads and builds, which grows like a leak."""
        return self.repeats or self.trains

    def elapsed(self) -> float:
        """Seconds since the watch began."""
        return time.perf_counter() - self._started

    def now(self) -> TrainingPosition:
        """Return the position, with the time."""
        return replace(self.position, time_s=self.elapsed())

    def backward_begins(self) -> None:
        self._runs_backward = True
        with self._lock:
            self.position = replace(self.position, phase="backward")
        self.thread = threading.get_ident()

    def backward_fails(self, in_closure: bool = False) -> None:
        """Note that a backward raised: it does not count."""
        with self._lock:
            self.position = replace(self.position, phase="optimizer" if in_closure else "forward")

    def backward_completes(self, in_closure: bool = False) -> bool:
        """Return whether this completes a micro-batch.

        Args:
            in_closure: an optimizer's step runs it. Such backwards belong to that step, because an optimizer
                may need one batch's gradient any number of times.
        """
        with self._lock:
            before = self.position
            self._pattern.backward_completes()
            if in_closure:
                self.position = replace(before, phase="optimizer")
            else:
                self.position = replace(
                    before,
                    phase="forward",
                    backwards=before.backwards + 1,
                    microbatch=1 if before.at_step_end else before.microbatch + 1,
                    at_step_end=False,
                )
        return not in_closure

    def gradients_complete(self) -> bool:
        """Return whether gradients of `torch.autograd.grad` count as a backward: if there is no other.

        They are no micro-batch: the inner loop of meta-learning computes many before the first backward.
        """
        with self._lock:
            before = self.position
            if self._runs_backward or before.step:
                return False
            self.position = replace(before, phase="forward", backwards=before.backwards + 1)
        return True

    def optimizer_begins(self) -> None:
        with self._lock:
            self.position = replace(self.position, phase="optimizer")

    def optimizer_ends(self, optimizer: object, inside_backward: bool) -> bool:
        """Return whether this completes a step now; see `StepPattern`.

        A step inside a backward is complete when the backward is: see `take_step_inside`.
        """
        with self._lock:
            self.position = replace(self.position, phase="backward" if inside_backward else "forward")
            if self._manual_steps:
                return False
            if inside_backward:
                self._stepped_inside.append(stepped(optimizer))
                return False
            return self._pattern.step([stepped(optimizer)])

    def take_step_inside(self) -> bool:
        """Return, once, whether optimizers inside the backward that just completed make a step."""
        with self._lock:
            inside, self._stepped_inside = self._stepped_inside, []
            return bool(inside) and self._pattern.step(inside)

    def user_step(self) -> bool:
        """Return whether a call of the program completes a step. After the first call, hooks count none."""
        counted_by_hook = self._pattern.counted_latest and not self._manual_steps
        self._manual_steps = True
        return not counted_by_hook

    def step_completes(self) -> None:
        with self._lock:
            before = self.position
            self.position = replace(
                before, step=before.step + 1, microbatches_per_step=before.into_step, at_step_end=True
            )
