"""Hooks that make marks: a wrapped `torch.autograd.backward` and the optimizers' global step hooks.

Global module hooks are never installed: with them, torch.compile compiles no graph. Nested backwards
(reentrant checkpointing runs one inside another) are not separate micro-batches; they are recognized by the
engine's graph task, not by a depth counter, because on CUDA they run on the engine's threads.

`torch.autograd.grad` is torch.compile's to trace, so that only what it calls, the engine, can be wrapped.

Some things have no such hook and make no marks: replayed CUDA graphs, optimizers that are not a
`torch.optim.Optimizer`. There, use `memtriage.step()` and `memtriage.mark()`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, Final, Protocol

from memtriage.process.replaced import leave_out_caller
from memtriage.process.stdlib import os


class TrainingEvents(Protocol):
    """What the hooks call: the watch (`session/core.py`), or a trace (`prediction/watch.py`).

    None of these may raise or keep its arguments.
    """

    def backward_begins(self) -> None: ...
    def backward_ends(self, failed: bool) -> None: ...
    def optimizer_begins(self, optimizer: Any) -> None: ...
    def optimizer_ends(self, optimizer: Any, inside_backward: bool) -> None: ...


@dataclass(slots=True)
class TrainingHooks:
    """Installs the hooks, at once or when the program imports torch, and removes them.

    Args:
        events: gets the events.
        gradients: called when `torch.autograd.grad` has computed gradients, outside of compilers and traces.
        attach: calls the function that attaches the hooks, which fails if the module `torch` is another one.
    """

    events: TrainingEvents
    attach: Callable[[Callable[[], None]], None] = lambda attach: attach()
    gradients: Callable[[], None] | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _finder: TorchImport | None = None
    _pid: int = field(default_factory=os.getpid)
    _compiling: Callable[[], bool] = lambda: False

    def install(self) -> None:
        """Install now if torch is imported, else right after its import.

        torch is not imported early: scripts set `CUDA_VISIBLE_DEVICES`, `PYTORCH_CUDA_ALLOC_CONF` or
        `OMP_NUM_THREADS` before they import it.
        """
        self._finder = TorchImport(self._arrived)
        self._finder.install()

    def remove(self) -> None:
        """Restore everything; wrappers that others put around our hooks meanwhile stay."""
        if self._finder is not None:
            self._finder.remove()
            self._finder = None
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _arrived(self) -> None:
        self.attach(self._attach)

    def _attach(self) -> None:
        import torch
        from torch.optim import optimizer

        self._compiling = torch.compiler.is_compiling
        original = torch.autograd.backward
        wrapper = self._wrapped(original)
        torch.autograd.backward = wrapper
        handles = [
            optimizer.register_optimizer_step_pre_hook(self._before_step),
            optimizer.register_optimizer_step_post_hook(self._after_step),
        ]

        def undo() -> None:
            if torch.autograd.backward is wrapper:
                torch.autograd.backward = original
            for handle in handles:
                handle.remove()

        self._undo.append(undo)
        if self.gradients is not None and hasattr(torch.autograd, _ENGINE):
            self._wrap_engine(self.gradients)

    def _wrap_engine(self, computed: Callable[[], None]) -> None:
        import torch

        original, pid, compiling = getattr(torch.autograd, _ENGINE), self._pid, torch.compiler.is_compiling

        @functools.wraps(original)
        def engine(*args: Any, **kwargs: Any) -> Any:
            of_grad = kwargs.get("accumulate_grad") is False and not inside_backward()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_out_caller(error)
                raise
            finally:
                del args, kwargs
            # A compiler that traces a backward computes no gradients.
            if (
                of_grad
                and not compiling()
                and not torch._C._len_torch_dispatch_stack()
                and os.getpid() == pid
            ):
                computed()
            return result

        def undo() -> None:
            if getattr(torch.autograd, _ENGINE) is engine:
                setattr(torch.autograd, _ENGINE, original)

        setattr(torch.autograd, _ENGINE, engine)
        self._undo.append(undo)

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        events, pid, compiling = self.events, self._pid, torch.compiler.is_compiling

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if compiling() or inside_backward() or os.getpid() != pid:
                return original(*args, **kwargs)
            events.backward_begins()
            failed = True
            try:
                result = original(*args, **kwargs)
                failed = False
            except BaseException as error:
                leave_out_caller(error)
                raise
            finally:
                # The arguments hold the loss: release it before the counters are read.
                del args, kwargs
                events.backward_ends(failed)
            return result

        return backward

    # The step hooks must be traceable: torch.compile(optimizer.step) traces through them, and folds
    # `is_compiling()` to True. Steps compiled that way make no marks.

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._compiling() and os.getpid() == self._pid:
            self.events.optimizer_begins(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._compiling() and os.getpid() == self._pid:
            self.events.optimizer_ends(optimizer, inside_backward())


def inside_backward() -> bool:
    """Whether the calling thread is inside a running backward."""
    # Not `import torch`: the program may have put another module there meanwhile.
    native = sys.modules.get("torch._C")
    return native is not None and native._current_graph_task_id() != -1


def inside_optimizer_step() -> bool:
    """Whether the calling function runs inside the step of an optimizer: in its closure.

    Decided by the calling frames, because a step that raises calls no hook at its end.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == _STEP and code.co_filename.endswith(_STEP_FILE):
            return True
        frame = frame.f_back
    return False


_ENGINE: Final = "_engine_run_backward"
_STEP: Final = "wrapper"
_STEP_FILE: Final = os.path.join("torch", "optim", "optimizer.py")
"""`Optimizer.profile_hook_step` wraps the `step` of every optimizer in a function of this name."""


class TorchImport(importlib.abc.MetaPathFinder):
    """Calls back once, right after `import torch` has run the package."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._searching = False

    def install(self) -> None:
        """Call back now if torch is imported, else after its import."""
        if "torch" in sys.modules:
            self._callback()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self)
        return spec

    def arrived(self) -> None:
        self.remove()
        self._callback()


class _CallingLoader(importlib.abc.Loader):
    """The real loader, with a callback after `exec_module`; leaves no trace in the module."""

    def __init__(self, loader: Any, finder: TorchImport) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.arrived()
