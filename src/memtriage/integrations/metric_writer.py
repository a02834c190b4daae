"""Write the gauges to a training loop's logger: TensorBoard, Weights & Biases, MLflow, a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from memtriage.integrations.metrics import metrics
from memtriage.process import active
from memtriage.report.monitoring.gauges import SCALAR_PREFIX

Sink = Callable[[dict[str, float], int], object]
"""Takes values by name, and the step that they belong to."""

_WANDB_STEP: Final = f"{SCALAR_PREFIX}step"


class MetricWriter:
    """Log the memory metrics at each call of `write()`.

        writer = memtriage.MetricWriter(SummaryWriter("runs/gpt2"))
        for batch in loader:
            train(batch)
            writer.write()

    Args:
        to: one or several of: TensorBoard's `SummaryWriter` (torch's or tensorboardX's), a run of Weights &
            Biases, the module `mlflow` (its active run), a Lightning logger, or a function that takes values
            by name and a step.
        every: write at every n-th call only.

    Raises:
        TypeError: something else was given.
        ValueError: `every` is below 1.

    Limits: without a watch (`memtriage run`, `memtriage.watch()`) there is nothing to write.
    """

    def __init__(self, *to: Any, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every!r}")
        if not to:
            raise TypeError(f"MetricWriter needs something to write to: {_EXPECTED}")
        self._sinks = [_sink(target) for target in to]
        self._every = every
        self._calls = 0

    def write(self, step: int | None = None) -> None:
        """Write the current values.

        Args:
            step: the step that they belong to; by default the optimizer steps that the watch has counted.
        """
        self._calls += 1
        session = active.session
        if session is None or (self._calls - 1) % self._every:
            return
        values = metrics()
        if values:
            for sink in self._sinks:
                sink(values, session.position.step if step is None else step)


_EXPECTED: Final = (
    "expected a TensorBoard SummaryWriter, a wandb run, the module mlflow, a Lightning logger, or a function "
    "of (values, step)"
)


def _sink(to: Any) -> Sink:
    """Recognize a logger by its methods, so that no library has to be imported."""
    if hasattr(to, "add_scalar"):
        return _tensorboard(to)
    if hasattr(to, "log_metrics"):
        return lambda values, step: to.log_metrics(values, step=step)
    if hasattr(to, "define_metric") and hasattr(to, "log"):
        # A step of our own: W&B counts every `log` call as a step, including the program's.
        to.define_metric(_WANDB_STEP, hidden=True)
        to.define_metric(f"{SCALAR_PREFIX}*", step_metric=_WANDB_STEP)
        return lambda values, step: to.log({**values, _WANDB_STEP: step})
    if callable(to):
        sink: Sink = to
        return sink
    raise TypeError(f"cannot write metrics to a {type(to).__name__}: {_EXPECTED}")


def _tensorboard(writer: Any) -> Sink:
    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write
