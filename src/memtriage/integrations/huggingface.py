"""memtriage in Hugging Face's Trainer (and whatever takes its callbacks, such as TRL's trainers).

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from memtriage.integrations.training import WatchedTraining


class MemtriageCallback(TrainerCallback):
    """Watches `trainer.train()`: what grows, what holds it, out-of-memory errors with their cause.

    Marks are made after each evaluation, prediction and save, besides those of steps and micro-batches. The
    report goes to the logger `memtriage`, its record below the trainer's output directory. Under `memtriage
    run` the callback only makes its marks.

    Args:
        directory: where the record goes; `<output_dir>/memtriage` by default.

    Attributes:
        report: the result (`memtriage.model.RunReport`) of the last training, on the first rank.

    Limits: Trainer tells callbacks of no error; then the report comes when the process ends.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = directory
        self._training = WatchedTraining()
        self.report: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.begin(Path(self._directory or Path(args.output_dir, "memtriage")))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report = self._training.end() or self.report

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.mark("evaluation")

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self._training.mark("prediction")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.mark("save")
