"""What `torch.compile` does in a trace: compile up to the kernels, or leave it out and say why."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import torch

from memtriage.allocator.settings import parse_version
from memtriage.prediction.build import BuildError
from memtriage.prediction.compiled import inductor
from memtriage.prediction.compiled.graphs import CudaGraphs
from memtriage.prediction.compiled.padding import Paddings
from memtriage.prediction.compiled.trials import KernelTrials
from memtriage.prediction.fake_cuda.stand_ins import replaced
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.notes import Notes
from memtriage.prediction.watch import TraceWatch

_GRAPHS: Final = "of CUDA graphs, only Inductor's trees are simulated"
_TREES_OPTION: Final = "triton.cudagraph_trees"
_TRIALS_MODES: Final = {"max-autotune-no-cudagraphs": None, "max-autotune": "reduce-overhead"}
"""Modes that choose kernels by timing them on the GPU, and what they are without that."""
_TRIALS_OPTIONS: Final = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
)
"""Options that choose kernels by timing them on the GPU."""
_BACKENDS: Final = ("inductor", "eager", "aot_eager")


def _refusal(options: dict[str, Any]) -> str | None:
    """Return why these options cannot be predicted: other CUDA graphs, or code that is not known."""
    backend = options.get("backend", "inductor")
    if isinstance(backend, str) and backend not in _BACKENDS:
        asked, why = f"backend={backend!r}", _GRAPHS if backend == "cudagraphs" else "its code is not known"
    elif (options.get("options") or {}).get(_TREES_OPTION) is False:
        asked, why = f"options={{{_TREES_OPTION!r}: False}}", _GRAPHS
    else:
        return None
    return _cannot(asked, why)


def _cannot(asked: str, why: str) -> str:
    return (
        f"torch.compile({asked}) cannot be predicted: {why}. Predict the program in the default mode instead"
    )


def _refusing(compiled: Any, why: str) -> Any:
    """Return what was compiled, refused when it is called: a library may compile what nobody uses."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise BuildError(why)

    if not isinstance(compiled, torch.nn.Module):
        return functools.wraps(compiled)(refuse)
    compiled.register_forward_pre_hook(refuse)
    return compiled


_CALLED: Final = "_callback_from_stance"
"""What Dynamo calls whenever a compiled function is called."""
_BACKEND: Final = "_torchdynamo_orig_backend"
"""Where Dynamo's callbacks keep what they wrap."""


def _earlier_options(callback: Any) -> dict[str, Any]:
    """The options of a function that was compiled before the trace."""
    while hasattr(callback, _BACKEND):
        callback = getattr(callback, _BACKEND)
    options: dict[str, Any] = getattr(callback, "config", None) or {}
    return options


class Compiler:
    """`torch.compile` for the time of a trace.

    Nothing is imported or replaced before the program calls it: Inductor takes seconds to import.

    Attributes:
        active: whether the program has compiled something.
        watch: told of the steps of optimizers that are compiled: these run no hooks.
    """

    def __init__(
        self,
        machine: GpuKind,
        version: tuple[int, int],
        notes: Notes,
        trials: KernelTrials,
        graphs: CudaGraphs,
    ) -> None:
        self._machine = machine
        self._cuda_graphs = graphs
        self._trials = trials
        self._paddings = Paddings(machine)
        self._version = version
        self._notes = notes
        self._entered = ExitStack()
        self._graphs = 0
        self._called = False
        self.active = False
        self.watch: TraceWatch | None = None

    def compile(self, original: Callable[..., Any], model: Any = None, **options: Any) -> Any:
        """What stands for `torch.compile`, the original.

        Raises:
            BuildError: the prediction is for another version of torch, which fuses otherwise.
        """
        if not self._compiles():
            return model if model is not None else lambda function: function
        if model is None:
            return original(**options)  # a decorator, which comes here again with the function
        refused = _refusal(options)
        if refused is not None:
            return _refusing(original(model, **options), refused)
        self._begin()
        compiled = original(model, **self._without_trials(options))
        optimizer = getattr(model, "__self__", None)
        if isinstance(optimizer, torch.optim.Optimizer) and model.__name__ == "step":
            return self._followed(optimizer, compiled)
        return compiled

    def _without_trials(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options by which Inductor chooses kernels without timing them, and note what is left out."""
        named = options.get("options") or {}
        dropped = [name for name in _TRIALS_OPTIONS if named.get(name)]
        mode = options.get("mode")
        if mode in _TRIALS_MODES:
            dropped, options = [f"mode={mode!r}"], {**options, "mode": _TRIALS_MODES[mode]}
        elif dropped:
            options = {
                **options,
                "options": {name: value for name, value in named.items() if name not in dropped},
            }
        if dropped:
            self._notes.add(
                f"torch.compile chooses kernels by timing them on the GPU ({', '.join(dropped)}): predicted "
                "with those of the default mode, and without the memory of the trials in the first step",
            )
        return options

    def _followed(self, optimizer: torch.optim.Optimizer, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled step of an optimizer, in the phase of its steps."""

        @functools.wraps(compiled)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self.watch is None:
                return compiled(*args, **kwargs)
            self.watch.optimizer_begins(optimizer)
            try:
                return compiled(*args, **kwargs)
            finally:
                self.watch.optimizer_ends(optimizer, False)

        return step

    def _states_made(self, optimizer: Any) -> None:
        if self.watch is not None:
            self.watch.states_made(optimizer)

    def earlier_compiled(self) -> AbstractContextManager[None]:
        """In the block, also compile what was given to `torch.compile` before, as by a decorator."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is None or not hasattr(dynamo, _CALLED):
            return nullcontext()
        original = getattr(dynamo, _CALLED)

        def called(callback: Any) -> Any:
            if callable(callback) and not self.active:
                if not self._compiles():
                    return None
                options = _earlier_options(callback)
                refused = _refusal({"options": options})
                tuned = next((name for name in _TRIALS_OPTIONS if options.get(name)), None)
                if refused is None and tuned is not None:
                    refused = _cannot(
                        f"options={{{tuned!r}: True}}", "it was compiled before the trace, to time kernels"
                    )
                if refused is not None:
                    raise BuildError(refused)
                self._begin()
            self._called |= callable(callback)
            return original(callback)

        return replaced(dynamo, _CALLED, called)

    def _compiles(self) -> bool:
        """Whether Inductor can run; a note says why not.

        Raises:
            BuildError: the prediction is for another version of torch, which fuses otherwise.
        """
        missing = inductor.missing()
        if missing is not None:
            self._notes.add(f"torch.compile is left out: {missing}")
            return False
        installed = parse_version(None)
        if self._version != installed:
            raise BuildError(
                f"torch.compile of torch {self._version[0]}.{self._version[1]} cannot be predicted with "
                f"torch {installed[0]}.{installed[1]}, which fuses otherwise: install that version, "
                "or leave out torch_version (--torch-version)"
            )
        return True

    def _begin(self) -> None:
        if not self.active:
            self.active = True
            self._graphs = inductor.graphs()
            self._entered.enter_context(
                inductor.without_gpu(
                    self._machine, self._trials, self._paddings, self._states_made, self._cuda_graphs
                )
            )

    def tried(self) -> int | None:
        """Bytes that trials of kernels have held at once; None where nothing was compiled or tried."""
        return self._trials.most if self.active or self._trials.most else None

    def close(self) -> None:
        """Drop what was compiled, and restore what was replaced."""
        if self._called and self.active and inductor.graphs() == self._graphs:
            self._notes.add(
                "torch.compile compiled nothing, as on a GPU: PyTorch skips the code of torch.nn itself; "
                "for an nn.Sequential write model.forward = torch.compile(model.forward)",
            )
        remark = self._paddings.remark()
        if remark is not None:
            self._notes.add(remark)
        self._entered.close()
        self.active = False
