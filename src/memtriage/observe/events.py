"""Count what a program does besides steps: saves, evaluations, epochs, batches, calls without gradients.

Functions of torch are replaced where that is free and no compiler traces through them. The first event after
a backward or a step counts; those that follow before the next one are the same event, such as the files of
one checkpoint, or the evaluation of two models.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, Final

from memtriage.model.code_origin import code_owner
from memtriage.model.findings import Event
from memtriage.observe.frames import frame_locals
from memtriage.process.replaced import Replaced, leave_out_caller
from memtriage.process.stdlib import os, time

_CHEAP_S: Final = 0.2e-3
_SHARE: Final = 0.05
"""Part of the time that readings of malloc may take if they are not cheap: they walk every free chunk."""
_LATER: Final = (
    ("safetensors.torch", "serialize_file"),
    ("safetensors.torch", "serialize"),
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),
)
"""Functions that save, in modules that a program imports when it likes."""


class EventCounts:
    """Counts events while it is installed.

    Args:
        trained: returns how many backwards and steps have completed, in all. A closure of an optimizer's step
            may run all backwards, which are not counted then.
        in_use: returns the bytes that malloc has handed out.

    Attributes:
        counts: by event; only those that have happened.
        came_with: bytes by which malloc's use rose during an event, or right before and after a save, less
            where it fell. Where two events always follow each other, that tells which one has the memory.
    """

    def __init__(self, trained: Callable[[], int], in_use: Callable[[], int | None]) -> None:
        self.counts: dict[Event, int] = {}
        self.came_with: dict[Event, int] = {}
        self._trained = trained
        self._in_use = in_use
        self._at: dict[Event, int] = {}
        self._before: tuple[Event | None, int | None] = (None, None)
        self._replaced: list[Replaced] = []
        self._waiting = list(_LATER)
        self._pid = os.getpid()
        self._due_s = 0.0

    def happened(self, event: Event) -> None:
        """Count an event, unless it belongs to the one before."""
        trained = self._trained()
        if not trained or self._at.get(event) != trained:
            self._at[event] = trained
            self.counts[event] = self.counts.get(event, 0) + 1

    def turns(self, to: Event | None, event: Event | None = None) -> None:
        """Note what malloc has handed out at the beginning or end of an event.

        Args:
            to: what begins, None where something ends.
            event: what all since the last turn belongs to; that which began there where it is None.
        """
        began, before = self._before
        at, started = time.perf_counter(), time.thread_time()
        now = self._in_use() if at >= self._due_s else None
        took = time.thread_time() - started
        if took > _CHEAP_S:
            self._due_s = at + took / _SHARE
        belongs = event or began
        if belongs is not None and before is not None and now is not None:
            self.came_with[belongs] = self.came_with.get(belongs, 0) + now - before
        self._before = to, now

    def install(self) -> None:
        """Begin to count. torch must be imported."""
        import torch
        from torch.utils.data import dataloader

        self._put(torch, save=self._saving(torch.save))
        self._put(torch.serialization, save=torch.save)
        self._put(torch.nn.Module, train=self._switching(torch.nn.Module.train))
        self._put(
            dataloader._BaseDataLoaderIter, __next__=self._giving(dataloader._BaseDataLoaderIter.__next__)
        )
        for mode in (torch.no_grad, torch.inference_mode):
            self._put(mode, __enter__=self._entering(mode.__enter__))

    def remove(self) -> None:
        """Put the functions back."""
        for replaced in self._replaced:
            replaced.restore()
        self._replaced.clear()

    def epoch_begins(self) -> None:
        """Take a pass over a loader: an epoch, or an evaluation if no gradients are recorded."""
        self.happened("epoch" if sys.modules["torch"].is_grad_enabled() else "evaluation")

    def now(self) -> dict[Event, int]:
        """Return the counts; functions of modules that have been imported since are replaced."""
        if self._replaced:
            self._find_more()
        return dict(self.counts)

    def _find_more(self) -> None:
        for entry in list(self._waiting):
            module = sys.modules.get(entry[0])
            original = getattr(module, entry[1], None)
            if module is not None and original is not None:
                self._waiting.remove(entry)
                self._put(module, **{entry[1]: self._saving(original)})

    def _put(self, module: Any, **wrappers: Callable[..., Any]) -> None:
        replaced = Replaced(module)
        replaced.put(**wrappers)
        self._replaced.append(replaced)

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            ours = os.getpid() == self._pid
            if ours:
                self.happened("save")
                self.turns("save", "save")
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_out_caller(error)
                raise
            finally:
                del args, kwargs
                if ours:
                    self.turns("save")

        return save

    def _switching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            outermost = sys._getframe(1).f_code is not original.__code__
            if outermost and os.getpid() == self._pid:
                if not mode and module.training:
                    self.happened("evaluation")
                    self.turns("evaluation")
                elif mode and not module.training:
                    self.turns(None)
            return original(module, mode)

        return train

    def _giving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(batches: Any) -> Any:
            batch = original(batches)
            if os.getpid() == self._pid:
                self.counts["batch"] = self.counts.get("batch", 0) + 1
            return batch

        return __next__

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from torch import is_grad_enabled

        @functools.wraps(original)
        def __enter__(mode: Any) -> Any:
            counts = is_grad_enabled() and not self._trained() and os.getpid() == self._pid
            if counts and _is_programs(sys._getframe(1)):
                self.counts["call"] = self.counts.get("call", 0) + 1
            return original(mode)

        return __enter__


def _is_programs(frame: FrameType | None) -> bool:
    """Whether a block without gradients is the program's, or a function that is its own or that it calls."""
    files = [] if frame is None else [frame.f_code.co_filename]
    if frame is not None and files[0].endswith(_DECORATED):
        called_by = frame.f_back
        files = [] if called_by is None else [called_by.f_code.co_filename]
        for _, function in frame_locals(frame, "func".__eq__):
            code = getattr(function, "__code__", None) if type(function) is FunctionType else None
            files += [] if code is None else [code.co_filename]
    return any(code_owner(file) == "user" for file in files)


_DECORATED: Final = os.path.join("torch", "utils", "_contextlib.py")
