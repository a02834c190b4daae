"""What happens to the trainer's memory around the refit: as NeMo-RL does it, or with `memtriage.phase`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor, nn

import fp8
import memtriage
from memtriage.treat.phase import PhaseReport, phase_end
from optim import Gradients, Offload, pinned, state_tensors

TREATMENTS: Final = ("none", "clear", "clear-all", "compact", "memtriage")


class Treatment(Protocol):
    """The moves of one step, in this order."""

    def weights_back(self) -> None:
        """The weights are on the GPU afterwards."""
        ...

    def states_back(self) -> None:
        """Before training: optimizer states come, and the gradients' buffer, all zero."""
        ...

    def after_training(self) -> None:
        """Both leave the GPU."""
        ...

    def after_refit(self) -> None:
        """The weights leave the GPU."""
        ...


class AsNemoRL:
    """The moves of `offload_before_refit` and `offload_after_refit`, with page-locked copies.

    Args:
        clear: what releases caches before memory is given back, at both.
        host: makes host memory.
        give_back: gives the driver back what is free.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        clear: Callable[[], None],
        host: Callable[[int], Tensor],
        give_back: Callable[[], object],
    ) -> None:
        self._model, self._optimizer, self._gradients = model, optimizer, gradients
        self._clear, self._give_back = clear, give_back
        self._weights, self._states = Offload(host), Offload(host)

    def weights_back(self) -> None:
        self._weights.to_device()

    def states_back(self) -> None:
        self._states.to_device()
        self._gradients.restore()

    def after_training(self) -> None:
        self._gradients.release()
        self._clear()
        self._states.to_host(state_tensors(self._optimizer))
        gc.collect()
        self._give_back()

    def after_refit(self) -> None:
        self._weights.to_host(self._model.parameters())
        self._clear()
        gc.collect()
        self._give_back()


class WithMemtriage:
    """The same moves by the ends of phases, as of `memtriage.phase`: they park, clear known caches, and
    compact what is left."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients
        self._optimizer = optimizer
        self._after_training = memtriage.PhasePolicy(park=(optimizer,))
        # Training has left no caches: what the refit makes is its buckets.
        self._after_refit = memtriage.PhasePolicy(clear=False, park=("parameters", model))
        self._parked = False

    def weights_back(self) -> None:
        if self._parked:
            memtriage.unpark("parameters", self._model)

    def states_back(self) -> None:
        if self._parked:
            memtriage.unpark(self._optimizer)
        self._gradients.restore()
        self._parked = False

    def after_training(self) -> None:
        self._gradients.release()
        _tell(phase_end("training", self._after_training))

    def after_refit(self) -> None:
        _tell(phase_end("refit", self._after_refit))
        self._parked = True


class InTurns:
    """Two treatments in one process. A turn is what follows from one: the ends of training and of the refit,
    bringing everything back, and training in the memory that it left. After one turn of each, which make the
    host memory that they keep, the order is first, second, second, first, and so on.
    """

    WARM_UP: Final = 2
    _ORDER: Final = (0, 1, 1, 0)

    def __init__(self, both: tuple[Treatment, Treatment]) -> None:
        self._both = both
        self._now = both[0]
        self._turns = 0

    def weights_back(self) -> None:
        self._now.weights_back()

    def states_back(self) -> None:
        self._now.states_back()

    def after_training(self) -> None:
        self._now = self._both[self.whose(self._turns)]
        self._turns += 1
        self._now.after_training()

    def after_refit(self) -> None:
        self._now.after_refit()

    @classmethod
    def whose(cls, turn: int) -> int:
        """0 or 1: whose turn it is; the first turn of all has number 0."""
        return turn if turn < cls.WARM_UP else cls._ORDER[(turn - cls.WARM_UP) % len(cls._ORDER)]


def make(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: Gradients,
    host: Callable[[int], Tensor] = pinned,
) -> Treatment:
    """The treatment of a name of `TREATMENTS`.

    `clear` is NeMo-RL's `force_clear_fp8_caches`; `clear-all` its `clear_memory_caches_before_refit` too;
    `compact` is `clear` with `memtriage.compact()` instead of `empty_cache()`.
    """
    if name == "memtriage":
        return WithMemtriage(model, optimizer, gradients)

    def clear() -> None:
        if name != "none":
            fp8.clear_workspaces(model)
        if name == "clear-all":
            model.rotary.forward.cache_clear()

    give_back = memtriage.compact if name == "compact" else torch.cuda.empty_cache
    return AsNemoRL(model, optimizer, gradients, clear, host, give_back)


def _tell(report: PhaseReport) -> None:
    """Where the time of a phase's end went."""
    parts = {"clear": report.cleared, "park": report.parked, "compact": report.compaction}
    told = ", ".join(f"{name} {part.seconds:.3f}" for name, part in parts.items() if part is not None)
    print(f"end of {report.name}: {report.seconds:.3f} s ({told})", flush=True)
