"""What `torch.compile` does in a trace: compile up to the kernels, or leave it out and say why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from memtriage.allocator.settings import parse_version
from memtriage.prediction.build import BuildError
from memtriage.prediction.compiled import inductor
from memtriage.prediction.compiled.trials import KernelTrials
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.notes import Notes

_TRIED: Final = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes that capture CUDA graphs or choose kernels by trial."""
_TRIED_OPTIONS: Final = ("triton.cudagraphs", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
"""Options that do."""
_BACKENDS: Final = ("inductor", "eager", "aot_eager")


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what depends on kernels that are tried, or on pools of CUDA graphs.

    Raises:
        BuildError: these options cannot be predicted; the text says which.
    """
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    named = options.get("options") or {}
    switched = [name for name in _TRIED_OPTIONS if named.get(name)]
    if isinstance(backend, str) and backend not in _BACKENDS:
        asked = f"backend={backend!r}"
    elif mode in _TRIED:
        asked = f"mode={mode!r}"
    elif switched:
        asked = f"options={{{switched[0]!r}: True}}"
    else:
        return
    raise BuildError(
        f"torch.compile({asked}) cannot be predicted: pools of CUDA graphs and kernels that are chosen by "
        "trial are known on the GPU alone; predict it without, in the default mode"
    )


class Compiler:
    """`torch.compile` for the time of a trace.

    Nothing is imported or replaced before the program calls it: Inductor takes seconds to import.

    Attributes:
        active: whether the program has compiled something.
    """

    def __init__(
        self, machine: GpuKind, version: tuple[int, int], notes: Notes, lifetimes: Lifetimes
    ) -> None:
        self._machine = machine
        self._trials = KernelTrials(lifetimes, machine.l2_cache)
        self._version = version
        self._notes = notes
        self._entered = ExitStack()
        self.active = False

    def stand_in(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function that replaces `torch.compile`.

        Raises:
            BuildError: the prediction is for another version of torch, which fuses otherwise.
        """

        def compile(model: Any = None, **options: Any) -> Any:
            missing = inductor.missing()
            if missing is not None:
                self._notes.add("compile", f"torch.compile is left out: {missing}")
                return model if model is not None else lambda function: function
            installed = parse_version(None)
            if self._version != installed:
                raise BuildError(
                    f"torch.compile of torch {self._version[0]}.{self._version[1]} cannot be predicted with "
                    f"torch {installed[0]}.{installed[1]}, which fuses otherwise: install that version, "
                    "or leave out torch_version (--torch-version)"
                )
            _check_options(options)
            self._begin()
            return original(model, **options)

        return compile

    def _begin(self) -> None:
        if not self.active:
            self.active = True
            self._entered.enter_context(inductor.without_gpu(self._machine, self._trials))

    def tried(self) -> int | None:
        """Bytes that trials of kernels have held at once; None where nothing was compiled."""
        return self._trials.most if self.active else None

    def close(self) -> None:
        """Drop what was compiled, and restore what was replaced."""
        self._entered.close()
        self.active = False
