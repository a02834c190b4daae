"""A whole training script, run as `__main__` under a trace until it has made its first steps.

A step ends where an optimizer steps that has stepped in it already: after the last optimizer before that, and
after whatever is freed next (`zero_grad`). In a script without a `torch.optim.Optimizer` each backward is a
step, up to the next forward. A script without a backward is one step: all that it does with its model.

When the last step is done, an exception that no program expects ends the script at its next operator on the
device: what it would do after training (evaluation, checkpoints, callbacks) does not run. If the host is
followed, it does run: loaders end, and the exception comes only if the script goes on stepping.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any, Final
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader

from memtriage.observe.objects import instances
from memtriage.observe.origin import package_folder
from memtriage.prediction.build import BuildError, of_the_trace, parameters_of
from memtriage.prediction.fake_cuda.stand_ins import replaced
from memtriage.prediction.fake_cuda.tensors import is_gpu, parts
from memtriage.prediction.lifetimes import FREE, LifetimeEvent, Lifetimes, Marker
from memtriage.prediction.sandbox.child import report_progress
from memtriage.prediction.watch import TracedProgram, TraceWatch

_KEPT: Final = frozenset({"parameter", "buffer", "optimizer state"})
_WAKES: Final = signal.SIGURG
"""Hardly any program handles it, none is ended by it, and a shell's `&` does not have it ignored."""
CALLS_WITHOUT_GROWTH: Final = 32
"""A script that is said to infer alone is ended when its first model was called so often without a new
highest: a loop over equal batches is settled by then, and generation grows with every token."""

STEPS_BEYOND: Final = 256
"""Steps or calls of a model after which a script whose host is followed is ended: its training loop does not
read a loader, or reads it again and again."""


class _Enough(BaseException):
    """The last step is done. No `except Exception` of the program stops it."""


class Script(TracedProgram):
    """A script or module and its arguments.

    Args:
        target: path of a Python file, or the name of a module.
        arguments: what it finds in `sys.argv`, without its own name.
        module: whether `target` is a module, run as `python -m` does.
        inference: it never makes an optimizer, so it may be ended once its model needs no more memory. Of no
            other script that is known before its end: it may evaluate its model first.

    Raises:
        BuildError: there is no such file or module.
    """

    varies = True

    def __init__(
        self, target: str, arguments: Sequence[str] = (), *, module: bool = False, inference: bool = False
    ) -> None:
        if module:
            _check_module(target)
        elif not os.path.isfile(target):
            raise BuildError(f"no such file: {target!r}; expected a training script, or FILE.py:FUNCTION")
        self._target = target
        self._arguments = list(arguments)
        self._module = module
        self._inference = inference

    def watch(self, lifetimes: Lifetimes) -> ScriptWatch:
        return ScriptWatch(lifetimes, self._inference)

    def run(self, watch: ScriptWatch, steps: int) -> int:
        watch.last = steps
        exited: str | None = None
        try:
            with (
                self._as_main(),
                watch.following_forward(),
                watch.loaders_ended(),
                _threads_heard(watch.lifetimes),
            ):
                self.execute(steps)
        except _Enough:
            if watch.host is not None:
                watch.left_out = "it was ended in its training loop"
        except SystemExit as error:
            exited = f"exited with status {error.code!r}"
        except Exception as error:
            if watch.made() < watch.last:
                raise
            watch.left_out = f"it raised {type(error).__name__}: {error}"
        made, steps = watch.made(), watch.last
        watch.conclude()
        if watch.host is not None:
            return made
        if watch.backwards and made < steps:
            raise BuildError(
                f"{self._target} {exited or 'ended'} after {made} training step{'s' * (made != 1)}; "
                f"expected at least {steps}: pass a smaller --steps or --horizon, arguments with which it "
                "trains longer, or a build function if its steps are made in a process of its own"
            )
        if "parameter" not in watch.owners.values():
            if exited is not None:
                raise BuildError(
                    f"{self._target} {exited} before it ran a model on the GPU: see what it printed, and "
                    "pass arguments with which it trains"
                )
            raise BuildError(
                f"{self._target} ran no model on the GPU; expected a script that uses `cuda` where "
                "torch.cuda.is_available()"
            )
        return made

    def execute(self, steps: int) -> None:
        """Run the program; it goes on stepping after `steps` steps, or ends by itself."""
        if self._module:
            runpy.run_module(self._target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self._target, run_name="__main__")

    @contextmanager
    def _as_main(self) -> Iterator[None]:
        """`sys.argv` and `sys.path` as the interpreter would set them."""
        argv, path = list(sys.argv), list(sys.path)
        folder = os.getcwd() if self._module else os.path.dirname(os.path.realpath(self._target))
        sys.argv[:] = [self._target, *self._arguments]
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.argv[:], sys.path[:] = argv, path


def _check_module(name: str) -> None:
    """Whether `python -m` would find the first part of this name; the rest is found when it runs.

    Raises:
        BuildError: it would not.
    """
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None:
        raise BuildError(f"no module named {name!r}; expected one that `python -m` can run here")


@contextmanager
def _threads_heard(lifetimes: Lifetimes) -> Iterator[None]:
    """What ends a thread of the script ends the script, where it is the trace's: it may wait for that thread.

    Outside the main thread, which alone gets signals, such a thread dies as usual; so does one that was there
    before, which an earlier trace may have left.

    Raises:
        BaseException: what ended the thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = threading.excepthook
    ended: list[BaseException] = []
    others = WeakSet(threading.enumerate())

    def hook(died: threading.ExceptHookArgs) -> None:
        error = died.exc_value
        of_trace = isinstance(error, _Enough) or (isinstance(error, Exception) and of_the_trace(error))
        if error is not None and of_trace and died.thread not in others:
            ended.append(error)
            lifetimes.over = end
            # A true signal: it wakes a thread that waits for a lock.
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKES)
        else:
            usual(died)

    def end(signum: int = _WAKES, frame: FrameType | None = None) -> None:
        # Python ignores what is raised in a finalizer, as those of a trace: the next operator raises it.
        waits = frame is None or not frame.f_code.co_filename.startswith(package_folder())
        if ended and waits:
            raise ended.pop()

    before = signal.signal(_WAKES, end)
    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = usual
        signal.signal(_WAKES, signal.SIG_DFL if before is None else before)


class ScriptWatch(TraceWatch):
    """Follows a script: finds its models and optimizers, and where its steps begin and end.

    Attributes:
        last: how many steps are wanted; may change while there are fewer.
        backwards: how many backward passes have begun.
        finished: the last step is done, and the script goes on because the host is followed.
        left_out: why the script did not run to its end after that; None where it did.
        begun: called with the number of each step that begins, from 0. A step begins again where what was
            taken for the end of the one before was not.
    """

    def __init__(self, lifetimes: Lifetimes, inference: bool = False) -> None:
        super().__init__(lifetimes)
        self._inference = inference
        self._runs_in = threading.get_ident()
        self.last = 0
        self.backwards = 0
        self.finished = False
        self.left_out: str | None = None
        self._beyond = 0
        self.begun: Callable[[int], None] = lambda step: None
        self._done = 0  # steps after which an optimizer came again
        self._ended = False  # the step is done, unless another optimizer follows
        self._stepped: set[int] = set()  # optimizers, in this step
        self._stepped_before: set[int] | None = None  # in the step before
        self._ever_stepped: set[int] = set()
        self._running: list[int] = []  # optimizers whose step has begun, the outermost first
        self._inside = False  # an optimizer stepped inside this backward
        self._looked_in = -1
        self._models: list[ref[nn.Module]] = []
        self._optimizers: list[ref[Any]] = []
        self._forwards: list[int] = []  # events at which forward follows a backward
        self._after_backward = False
        self._blocks_before = 0  # blocks that there were when the last backward ended
        self._used_at: int | None = None  # the event at which a model was first called
        self._first_model: ref[nn.Module] | None = None
        self._calls = self._highest = 0
        self._left_out = 0  # optimizers that have not stepped

    @contextmanager
    def following_forward(self) -> Iterator[None]:
        """In the block calls of modules are seen: where training begins, and where steps without an optimizer
        end."""

        def called(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling():  # which would trace what follows as a part of the program
                self._called(module)

        handle = register_module_forward_pre_hook(called)
        try:
            yield
        finally:
            handle.remove()

    def loaders_ended(self) -> AbstractContextManager[None]:
        """In the block loaders end once the last step is done; what begins then gives one batch."""
        original = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            begun_after = self.finished
            for batch in original(loader):
                yield batch
                del batch
                if self.finished or begun_after:
                    return

        return nullcontext() if self.host is None else replaced(DataLoader, "__iter__", iterate)

    def _enough(self) -> None:
        """The last step is done: end the script, or go on without the GPU where the host is followed."""
        in_thread = self.host is None and threading.get_ident() != self._runs_in
        # One of the script's threads ends by the exception. The script has to end as well, wherever it is.
        self.lifetimes.over = self._enough if in_thread else None
        if self.host is None:
            raise _Enough
        self.finished = True
        self.lifetimes.close()

    def _goes_on(self) -> None:
        """A step or call of a script whose last step is done."""
        self._beyond += 1
        if self._beyond > STEPS_BEYOND:
            raise _Enough

    def _called(self, module: nn.Module) -> None:
        if self.finished:
            if self._first_model is not None and self._first_model() is module and not self.backwards:
                self._goes_on()
            return
        if self._used_at is not None and self._first_model is not None and self._first_model() is module:
            self._called_again()
        trains = module.training and torch.is_grad_enabled()
        if not (self._used_at is None or (trains and (self.step < 0 or self._after_backward))):
            return
        if not any(is_gpu(parameter) for parameter in module.parameters()):
            return
        if self._used_at is None:
            self._used_at = len(self.lifetimes.recording.events)
            self._first_model = ref(module)
            self._look()
            self.lifetimes.enter("forward", self.step)
        if trains and self.step < 0:
            self._begin(0)
        if trains and self._after_backward:
            self._forward_follows()

    def _called_again(self) -> None:
        """Ends a script that only infers once it needs no more memory."""
        if self.backwards:
            return
        self._calls += 1
        if self._inference and self.lifetimes.highest > self._highest:
            self._highest, self._calls = self.lifetimes.highest, 0
        if self._calls % CALLS_WITHOUT_GROWTH == 0 and self._calls:
            if self._inference:
                self._enough()
            report_progress(f"{self._calls} calls of its model, no training so far (see --inference)")

    def _forward_follows(self) -> None:
        """A step ends here, in a script without an optimizer."""
        self._after_backward = False
        if self._ever_stepped:
            return
        self._forwards.append(len(self.lifetimes.recording.events))
        settled = self._inference or self._updated()
        if len(self._forwards) >= self.last and settled and not self._has_optimizer():
            self._enough()

    def _updated(self) -> bool:
        """Whether the script itself has updated a parameter since the backward.

        If not, these backwards may be checks or estimates before training, and an optimizer may follow.
        """
        blocks = {
            self.lifetimes.block_of(part.untyped_storage())
            for parameter in self.parameters()
            for part in parts(parameter)
        }
        return any(
            block is not None and (block >= self._blocks_before or block in self.lifetimes.written)
            for block in blocks
        )

    def _has_optimizer(self) -> bool:
        """Whether there is a `torch.optim.Optimizer`, which may be about to step."""
        if not self.optimizers():
            self._look()
        return any(map(self._is_traced, parameters_of(*self.optimizers())))

    def models(self) -> tuple[nn.Module, ...]:
        """Modules that are part of no other, as of the last look."""
        return tuple(model for reference in self._models if (model := reference()) is not None)

    def optimizers(self) -> tuple[Any, ...]:
        return tuple(each for reference in self._optimizers if (each := reference()) is not None)

    def _look(self) -> None:
        """Finds what the script has made; references are weak, as it may drop it."""
        modules, optimizers = [], []
        for candidate in instances(lambda kind: issubclass(kind, (nn.Module, torch.optim.Optimizer))):
            # What is only half initialized has no attributes yet.
            if issubclass(type(candidate), nn.Module):
                if "_modules" in candidate.__dict__:
                    modules.append(candidate)
            elif "defaults" in candidate.__dict__:
                optimizers.append(candidate)
        inside = {id(child) for module in modules for child in module.children()}
        roots = (module for module in modules if id(module) not in inside)
        self._models = [ref(root) for root in roots if any(map(self._is_traced, root.parameters()))]
        self._optimizers = [ref(optimizer) for optimizer in optimizers]
        self.note_model()

    def backward_begins(self) -> None:
        if self.finished:
            return
        if self.step < 0:
            self._begin(0)
        if self._after_backward:  # forward called no module
            self._forward_follows()
        self.backwards += 1
        self._inside = False
        if self._looked_in != self.step:
            self._looked_in = self.step
            self._look()
        super().backward_begins()

    def backward_ends(self, failed: bool) -> None:
        if self.finished:
            self.note_gradients()
            return
        super().backward_ends(failed)
        self._after_backward = True
        self._blocks_before = len(self.lifetimes.recording.blocks)
        self.lifetimes.written.clear()
        if self._inside:
            self._end()

    def optimizer_begins(self, optimizer: Any) -> None:
        if self.finished:
            return
        number = id(optimizer)
        if number in self._running:  # its last step raised
            del self._running[self._running.index(number) :]
        if not self._running:
            self._comes(number)
        self._running.append(number)
        super().optimizer_begins(optimizer)

    def _comes(self, optimizer: int) -> None:
        """An optimizer steps, and not as a part of another one."""
        if not self._ever_stepped:  # it may have been made as late as this
            self._look()
        if self._ended:
            if optimizer in self._stepped:
                self._confirm()
            else:
                self._resume()
        self._stepped.add(optimizer)

    def optimizer_ends(self, optimizer: Any, inside_backward: bool) -> None:
        if self.finished:
            self.note_states()
            self._goes_on()
            return
        super().optimizer_ends(optimizer, inside_backward)
        self._ever_stepped.update(self._running[-1:])
        del self._running[-1:]
        if self._running:
            return
        if inside_backward:
            self._inside = True
        else:
            self._end()

    def made(self) -> int:
        """How many steps were made."""
        if self._ever_stepped:
            return min(self._done + self._ended, self.last)
        if self.backwards:
            return min(len(self._forwards) + self._after_backward, self.last)
        return int(self._used_at is not None)

    def remarks(self) -> list[str]:
        if self.host is not None:
            if self.left_out is None:
                return []
            return [f"the host's memory is that until the script was left: {self.left_out}"]
        if not self.backwards:
            until = f", until {CALLS_WITHOUT_GROWTH} calls needed no more memory" if self._inference else ""
            return [
                f"no backward ran: the figures are those of all that the script did with its model{until}"
            ]
        if not self._ever_stepped:
            return ["no torch.optim.Optimizer stepped: each backward counts as a step"]
        if self._left_out:
            return [
                f"{self._left_out} of the script's optimizers did not step in the traced steps: pass a "
                "larger --steps to have their states in the figures"
            ]
        return []

    def conclude(self) -> None:
        """The script has ended: what came after its last step goes, and each step ends with its frees."""
        recording = self.lifetimes.recording
        if not self._ever_stepped:
            self._divide()
        events = recording.events
        for position, marker in enumerate(recording.markers):
            if marker.phase == "forward" and position and recording.markers[position - 1].step < marker.step:
                begins = marker.event
                while begins < len(events) and self._of_the_step(events[begins]):
                    begins += 1
                recording.markers[position] = replace(marker, event=begins)
        while recording.markers and recording.markers[-1].step >= self.last:
            del events[recording.markers.pop().event :]
        recording.releases[:] = [release for release in recording.releases if release <= len(events)]
        recording.uses[:] = [use for use in recording.uses if use.event < len(events)]
        recording.pool_states[:] = [state for state in recording.pool_states if state.event < len(events)]

    def _divide(self) -> None:
        """Divide what a script without an optimizer did into steps, where forward follows a backward.

        A script without a backward has one step, from the first call of a model on.
        """
        recording = self.lifetimes.recording
        if not self.backwards:
            if self._used_at is not None:
                recording.markers[:] = [
                    *(marker for marker in recording.markers if marker.event < self._used_at),
                    Marker(self._used_at, "forward", 0),
                ]
            return
        starts = self._forwards
        markers = [Marker(event, "forward", step) for step, event in enumerate(starts, 1)]
        markers += [
            replace(marker, step=marker.step + bisect_right(starts, marker.event))
            for marker in recording.markers
        ]
        recording.markers[:] = sorted(markers, key=lambda marker: marker.event)

    def _is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the device of this trace."""
        return any(
            is_gpu(part) and self.lifetimes.block_of(part.untyped_storage()) is not None
            for part in parts(tensor)
        )

    def _of_the_step(self, event: LifetimeEvent) -> bool:
        """Whether it frees what a step has made; what stays from step to step goes with the script."""
        owner = self.owners.get(event.block)
        made_in = self.lifetimes.recording.blocks[event.block].phase
        return event.size == FREE and made_in != "build" and owner not in _KEPT

    def _begin(self, step: int) -> None:
        self.step = step
        self.lifetimes.enter("forward", step)
        self.begun(step)
        if step == 0:
            self.progress(1, self.last)

    def _end(self) -> None:
        """The step is done, unless another optimizer follows."""
        if not self._ended:
            self._ended = True
            self._begin(self.step + 1)
        if self._done + 1 < self.last:
            return
        self._note_left_out()
        # Whether another optimizer follows is known from the step before, or from those that there are.
        before = self._stepped_before
        if self._stepped == before if before is not None else not self._left_out:
            self.lifetimes.over = self._enough

    def _confirm(self) -> None:
        """An optimizer comes again: the step ended before."""
        self._ended = False
        self._done += 1
        self._stepped, self._stepped_before = set(), self._stepped
        if self._done >= self.last:
            self._note_left_out()
            self._enough()
            return
        self.progress(self._done + 1, self.last)

    def _resume(self) -> None:
        """Another optimizer comes: what was taken for the end of the step was not."""
        self._ended = False
        self.step -= 1
        markers = self.lifetimes.recording.markers
        markers[:] = [replace(marker, step=min(marker.step, self.step)) for marker in markers]
        self.lifetimes.step = self.step

    def _note_left_out(self) -> None:
        ever = (optimizer for optimizer in self.optimizers() if id(optimizer) in self._ever_stepped)
        stepped = set(map(id, parameters_of(*ever)))
        self._left_out = sum(
            any(
                id(parameter) not in stepped and self._is_traced(parameter)
                for parameter in parameters_of(optimizer)
            )
            for optimizer in self.optimizers()
        )
