"""What `torch.compile` does in a trace: compile up to the kernels, or leave it out and say why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from memtriage.allocator.settings import parse_version
from memtriage.prediction.build import BuildError
from memtriage.prediction.compiled import inductor
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.notes import Notes

_TRIED: Final = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes that capture CUDA graphs or choose kernels by trial."""


class Compiler:
    """`torch.compile` for the time of a trace.

    Nothing is imported or replaced before the program calls it: Inductor takes seconds to import.

    Attributes:
        active: whether the program has compiled something.
    """

    def __init__(self, machine: GpuKind, version: tuple[int, int], notes: Notes) -> None:
        self._machine = machine
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
            if options.get("mode") in _TRIED:
                self._notes.add(
                    "compile mode",
                    f"torch.compile(mode={options['mode']!r}) is predicted as the default: pools of CUDA "
                    "graphs and kernels that are chosen by trial are not known",
                )
                options["mode"] = None
            self._begin()
            return original(model, **options)

        return compile

    def _begin(self) -> None:
        if not self.active:
            self.active = True
            self._entered.enter_context(inductor.without_gpu(self._machine))

    def close(self) -> None:
        """Drop what was compiled, and restore what was replaced."""
        self._entered.close()
        self.active = False
