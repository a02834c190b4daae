"""A whole training script, run as `__main__` under a trace until it has made its first optimizer steps.

A step ends with the last optimizer that steps before the next backward, and with whatever is freed right
after it (`zero_grad`). When the last step is done, an exception that no program expects ends the script at
its next allocation: what it would do after training (evaluation, checkpoints) does not run.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memtriage.predict.build import BuildError
from memtriage.predict.lifetimes import FREE, Event, Lifetimes
from memtriage.predict.tensors import is_gpu, parts
from memtriage.predict.watch import Program, Watch

_KEPT: Final = frozenset({"parameter", "buffer", "optimizer state"})
_WAKES: Final = signal.SIGURG
"""Hardly any program handles it, none is ended by it, and a shell's `&` does not have it ignored."""


class _Enough(BaseException):
    """The last step is done. No `except Exception` of the program stops it."""


class Script(Program):
    """A script and its arguments.

    Args:
        file: path of a Python file.
        arguments: what it finds in `sys.argv`, without its own name.

    Raises:
        BuildError: there is no such file.
    """

    def __init__(self, file: str, arguments: Sequence[str] = ()) -> None:
        if not os.path.isfile(file):
            raise BuildError(f"no such file: {file!r}; expected a training script, or FILE.py:FUNCTION")
        self._file = file
        self._arguments = list(arguments)

    def watch(self, lifetimes: Lifetimes) -> ScriptWatch:
        return ScriptWatch(lifetimes)

    def run(self, watch: ScriptWatch, steps: int) -> None:
        watch.last = steps
        ended = "ended"
        try:
            with _as_main(self._file, self._arguments), watch.awaiting_forward(), _threads_heard():
                runpy.run_path(self._file, run_name="__main__")
        except _Enough:
            pass
        except _ThreadDied as died:
            raise BuildError(str(died)) from None
        except SystemExit as error:
            ended = f"exited with status {error.code!r}"
        except Exception:
            if watch.done < steps:
                raise
        watch.conclude()
        if watch.done < steps:
            raise BuildError(
                f"{self._file} {ended} after {watch.done} optimizer steps; expected at least {steps}: pass a "
                "smaller --steps, arguments with which it trains, or a build function if its optimizer is no "
                "torch.optim.Optimizer or steps in a process of its own"
            )
        if "parameter" not in watch.owners.values():
            raise BuildError(
                f"{self._file} trained no model on the GPU; expected a script that trains on `cuda` where "
                "torch.cuda.is_available()"
            )


class _ThreadDied(BaseException):
    """What is wrong with a thread of the script, and what to change."""


@contextmanager
def _threads_heard() -> Iterator[None]:
    """A thread that dies of using the device ends the block, which may wait for that thread forever.

    Outside the main thread, which alone gets signals, such a thread dies as usual.

    Raises:
        _ThreadDied: one did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = threading.excepthook
    failures: list[str] = []

    def hook(died: threading.ExceptHookArgs) -> None:
        if isinstance(died.exc_value, (RuntimeError, AssertionError)) and "CUDA" in str(died.exc_value):
            name = "a thread" if died.thread is None else f"the thread {died.thread.name!r}"
            failures.append(
                f"{name} used the device; only the thread that runs the step is traced: send to the "
                "device in that one, or give a build function"
            )
            # A true signal: it wakes a thread that waits for a lock.
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKES)
        else:
            usual(died)

    def woken(signum: int, frame: object) -> None:
        if failures:
            raise _ThreadDied(failures[0])

    before = signal.signal(_WAKES, woken)
    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = usual
        signal.signal(_WAKES, signal.SIG_DFL if before is None else before)


@contextmanager
def _as_main(file: str, arguments: list[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the interpreter would set them for a script."""
    argv, path = list(sys.argv), list(sys.path)
    sys.argv[:] = [file, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


class ScriptWatch(Watch):
    """Follows a script: finds its models and optimizers, and tells where its steps begin and end.

    Attributes:
        last: how many steps are wanted.
        done: how many were made.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        super().__init__(lifetimes)
        self.last = 0
        self.done = 0
        self._stepped = False  # since the last backward began
        self._inside = False  # an optimizer stepped inside this backward
        self._ends = 0  # of optimizers, in this step
        self._ends_before: int | None = None
        self._looked_in = -1
        self._models: list[ref[nn.Module]] = []
        self._optimizers: list[ref[Any]] = []

    @contextmanager
    def awaiting_forward(self) -> Iterator[None]:
        """The first step begins when a module is first called to be trained."""
        with ExitStack() as stack:

            def called(module: nn.Module, inputs: Any) -> None:
                trains = self.step < 0 and module.training and torch.is_grad_enabled()
                if trains and any(is_gpu(each) for each in module.parameters()):
                    self._begin(0)
                    stack.close()

            stack.callback(register_module_forward_pre_hook(called).remove)
            yield

    def models(self) -> tuple[nn.Module, ...]:
        """Modules that are part of no other, as of the last look."""
        return tuple(model for reference in self._models if (model := reference()) is not None)

    def optimizers(self) -> tuple[Any, ...]:
        return tuple(each for reference in self._optimizers if (each := reference()) is not None)

    def parameters(self) -> Iterable[torch.Tensor]:
        found = {id(each): each for model in self.models() for each in model.parameters()}
        for optimizer in self.optimizers():
            found.update((id(each), each) for group in optimizer.param_groups for each in group["params"])
        return found.values()

    def _look(self) -> None:
        """Finds what the script has made; references are weak, as it may let go of it."""
        modules, optimizers = [], []
        for each in gc.get_objects():
            # Not isinstance, which asks the object: dead proxies raise.
            if issubclass(type(each), nn.Module) and "_modules" in each.__dict__:
                modules.append(each)
            elif issubclass(type(each), torch.optim.Optimizer) and "defaults" in each.__dict__:
                optimizers.append(each)
        inside = {id(child) for module in modules for child in module.children()}
        roots = (each for each in modules if id(each) not in inside)
        self._models = [ref(each) for each in roots if any(map(self._is_traced, each.parameters()))]
        self._optimizers = [ref(each) for each in optimizers]
        self.note_model()

    def backward_begins(self) -> None:
        if self.done >= self.last:
            raise _Enough
        if self.step < 0:
            self._begin(0)
        self._stepped = self._inside = False
        if self._ends:
            self._ends_before, self._ends = self._ends, 0
        if self._looked_in != self.step:
            self._looked_in = self.step
            self._look()
        super().backward_begins()

    def backward_ends(self, failed: bool) -> None:
        super().backward_ends(failed)
        if self._inside:
            self.note_instant("step")
            self._end()

    def optimizer_begins(self) -> None:
        if not self.done and not self._ends:  # an optimizer may be made as late as this
            self._look()
        super().optimizer_begins()

    def optimizer_ends(self, inside_backward: bool) -> None:
        if self._stepped:
            self._resume()
        super().optimizer_ends(inside_backward)
        if inside_backward:
            self._inside = True
        else:
            self._end()

    def conclude(self) -> None:
        """The script has ended: what came after its last step goes, and each step ends with its frees."""
        recording = self.lifetimes.recording
        events = recording.events
        for position, marker in enumerate(recording.markers):
            if marker.phase == "forward" and position and recording.markers[position - 1].step < marker.step:
                begins = marker.event
                while begins < len(events) and self._of_the_step(events[begins]):
                    begins += 1
                recording.markers[position] = replace(marker, event=begins)
        while recording.markers and recording.markers[-1].step >= self.last:
            del events[recording.markers.pop().event :]
        self.instants = [each for each in self.instants if each.step < self.last]
        recording.releases[:] = [each for each in recording.releases if each <= len(events)]
        recording.uses[:] = [each for each in recording.uses if each.event < len(events)]

    def _is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on the device of this trace."""
        return any(
            is_gpu(part) and self.lifetimes.block_of(part.untyped_storage()) is not None
            for part in parts(tensor)
        )

    def _of_the_step(self, event: Event) -> bool:
        """Whether it frees what a step has made; what stays from step to step goes with the script."""
        owner = self.owners.get(event.block)
        made_in = self.lifetimes.recording.blocks[event.block].phase
        return event.size == FREE and made_in != "build" and owner not in _KEPT

    def _begin(self, step: int) -> None:
        self.step = step
        self.lifetimes.enter("forward", step)

    def _end(self) -> None:
        """A step is done, unless another optimizer steps before the next backward."""
        self._stepped = True
        self._ends += 1
        self.done += 1
        self._begin(self.step + 1)
        # Whether another optimizer follows is known from the step before.
        if self.done >= self.last and self._ends == self._ends_before:
            self.lifetimes.allocated = _stop

    def _resume(self) -> None:
        """No backward since what was taken for the end of a step: the step has gone on until now."""
        self.done -= 1
        self.step -= 1
        markers = self.lifetimes.recording.markers
        markers[:] = [replace(each, step=min(each.step, self.step)) for each in markers]
        self.lifetimes.step = self.step


def _stop(block: int) -> None:
    raise _Enough
