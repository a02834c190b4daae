"""memtriage in Hugging Face's Trainer (and whatever takes its callbacks, such as TRL's trainers).

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

from memtriage.integrations.metrics import metrics
from memtriage.integrations.training import WatchedTraining
from memtriage.process.optional import needs

with needs("transformers", "hf", "Trainer's callback"):
    from transformers import TrainerCallback
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_callback import CallbackHandler


class MemtriageCallback(TrainerCallback):
    """Watches `trainer.train()`: what grows, what holds it, out-of-memory errors with their cause.

    Marks are made after each evaluation, prediction and save, besides those of steps and micro-batches. The
    report goes to the logger `memtriage`, its record below the trainer's output directory. Under `memtriage
    run` the callback only makes its marks.

    Whenever Trainer logs, the metrics of memory go to the reporters of `report_to` (TensorBoard, Weights &
    Biases, MLflow, ...) as well: see docs/metrics.md. Without reporters this costs nothing.

    Args:
        directory: where the record goes; `<output_dir>/memtriage` by default.
        metrics: False to leave the reporters alone.

    Attributes:
        report: the result (`memtriage.RunReport`) of the last training, on the first rank.

    Limits: Trainer tells callbacks of no error; then the report comes when the process ends.
    """

    def __init__(self, directory: str | Path | None = None, *, metrics: bool = True) -> None:
        self._directory = directory
        self._metrics = metrics
        self._reporters: list[TrainerCallback] = []
        self._training = WatchedTraining()
        self.report: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._metrics and state.is_world_process_zero:
            self._reporters = _reporters(sys._getframe(1))
        self._training.begin(Path(self._directory or Path(args.output_dir, "memtriage")))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._reporters = []
        self.report = self._training.end() or self.report

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._reporters and (values := metrics()):
            for reporter in self._reporters:
                reporter.on_log(args, state, control, logs=dict(values), **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.mark("evaluation")

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self._training.mark("prediction")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.mark("save")


_ONCE_A_STEP: Final = frozenset({"dvclive"})
"""Reporters that take logs for the end of a step: a second call would count one more."""


def _reporters(frame: FrameType | None) -> list[TrainerCallback]:
    """Return the callbacks that `report_to` stands for, of the Trainer that is calling from this frame.

    Trainer tells a callback neither of itself nor of the others; and those have had the logs, when this one
    gets them, so that adding to the logs would reach no one but the progress bar, which prints them.
    """
    kinds: tuple[type[TrainerCallback], ...] = tuple(
        callback for name, callback in INTEGRATION_TO_CALLBACK.items() if name not in _ONCE_A_STEP
    )
    while frame is not None and frame.f_code is not CallbackHandler.call_event.__code__:
        frame = frame.f_back
    if frame is None:
        return []
    return [callback for callback in frame.f_locals["self"].callbacks if isinstance(callback, kinds)]
