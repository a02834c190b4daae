"""What the callbacks for Lightning do. The package has two names, with a base class in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memtriage.integrations.metrics import metrics
from memtriage.integrations.training import WatchedTraining


class LightningHooks:
    """Watches `trainer.fit()`: what grows, what holds it, out-of-memory errors with their cause.

    Marks are made after each validation and checkpoint, besides those of steps and micro-batches. The report
    goes to the logger `memtriage`, its record below the trainer's folder. Under `memtriage run` the callback
    only makes its marks.

    At the steps at which the trainer logs (`log_every_n_steps`), the metrics of memory go to its loggers as
    well: see docs/metrics.md. Without loggers this costs nothing.

    Args:
        directory: where the record goes; `<log_dir or default_root_dir>/memtriage` by default.
        metrics: False to leave the loggers alone.

    Attributes:
        report: the result (`memtriage.RunReport`) of the last training, on the first rank.
    """

    def __init__(self, directory: str | Path | None = None, *, metrics: bool = True) -> None:
        self._directory = directory
        self._metrics = metrics
        self._logged_step = 0  # or the step that a checkpoint left off at
        self._training = WatchedTraining()
        self.report: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._logged_step = trainer.global_step
        folder = self._directory or Path(trainer.log_dir or trainer.default_root_dir, "memtriage")
        self._training.begin(Path(folder))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.report = self._training.end() or self.report

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.report = self._training.end(exception) or self.report

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every, step = trainer.log_every_n_steps, trainer.global_step
        if not (self._metrics and every and trainer.loggers and trainer.is_global_zero):
            return
        if step % every or step == self._logged_step:  # none yet, or a batch of several that make one
            return
        self._logged_step = step
        if values := metrics():
            for logger in trainer.loggers:
                logger.log_metrics(dict(values), step=step - 1)  # Lightning counts the steps it logs from 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.mark("evaluation")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._training.mark("save")
