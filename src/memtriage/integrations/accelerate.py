"""memtriage in training loops on Hugging Face Accelerate, without a Trainer.

with watched(accelerator) as training:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    train()
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from memtriage.integrations.training import WatchedTraining
from memtriage.model.report import RunReport

_MARKED: Final = {
    "prepare": "prepare",
    "save_state": "save",
    "load_state": "load",
    "free_memory": "free memory",
}
"""Methods of an accelerator, and the marks that are made when they have returned."""


class WatchedAccelerator:
    """A watch over a block of code that trains with an accelerator; see `watched`.

    Attributes:
        report: the result (`memtriage.RunReport`) after the block, on the first rank.
    """

    def __init__(self, accelerator: Any, directory: str | os.PathLike[str] | None) -> None:
        self._accelerator = accelerator
        self._directory = directory
        self._training = WatchedTraining()
        self._wrapped: list[str] = []
        self.report: RunReport | None = None

    def __enter__(self) -> WatchedAccelerator:
        folder = self._directory
        if folder is None and self._accelerator.project_dir is not None:
            folder = Path(self._accelerator.project_dir, "memtriage")
        self._training.begin(None if folder is None else Path(folder))
        for method, mark in _MARKED.items():
            self._mark_after(method, mark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for method in self._wrapped:
            delattr(self._accelerator, method)
        self._wrapped.clear()
        self.report = self._training.end(error)

    def _mark_after(self, method: str, mark: str) -> None:
        own: Callable[..., Any] | None = getattr(self._accelerator, method, None)
        if own is None or method in vars(self._accelerator):
            return  # not in this version, or somebody else's: that stays as it is

        @functools.wraps(own)
        def marked(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            self._training.mark(mark)
            return result

        setattr(self._accelerator, method, marked)
        self._wrapped.append(method)


def watched(accelerator: Any, *, directory: str | os.PathLike[str] | None = None) -> WatchedAccelerator:
    """Return a context manager that watches the block inside it, on every process of the job.

    Marks are made when `prepare`, `save_state`, `load_state` and `free_memory` have returned, besides those
    of every step and micro-batch; under `accumulate` a step is one of the optimizer. The report goes to the
    logger `memtriage` of the first process, over all of them. Under `memtriage run` only the marks are made.

    Args:
        accelerator: an `accelerate.Accelerator`.
        directory: where the record goes; `<project_dir>/memtriage` by default, without a `project_dir`
            `$MEMTRIAGE_DIR` or `memtriage-run`.
    """
    return WatchedAccelerator(accelerator, directory)
