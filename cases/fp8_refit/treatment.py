"""What happens to the trainer's memory around the refit: as NeMo-RL does it, or with `memtriage.phase`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor, nn

import fp8
import memtriage
from memtriage.treat.phase import PhaseReport, bring_back, phase_end
from optim import Gradients, Offload, pinned, state_tensors

TREATMENTS: Final = ("none", "clear", "clear-all", "compact", "memtriage", "memtriage-unprimed")


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
    """The same moves by phases of memtriage: they park, clear known caches, compact what is left, and prime
    memory when training begins again.

    Args:
        prime: False leaves that out.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Gradients, prime: bool = True
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._training = memtriage.PhasePolicy(unpark=("parameters", model), prime=prime, park=(optimizer,))
        # Training has left no caches: what the refit makes is its buckets.
        self._refit = memtriage.PhasePolicy(clear=False, park=("parameters", model))
        self._phase: memtriage.Phase | None = None

    def weights_back(self) -> None:
        self._phase = memtriage.phase("training", self._training)
        self._phase.__enter__()

    def states_back(self) -> None:
        bring_back((self._optimizer,))
        self._gradients.restore()

    def after_training(self) -> None:
        self._gradients.release()
        if self._phase is None:  # the other treatment had the turn before
            _tell(phase_end("training", self._training))
            return
        self._phase.__exit__(None, None, None)
        assert self._phase.report is not None
        _tell(self._phase.report, self._phase.primed)
        self._phase = None

    def after_refit(self) -> None:
        _tell(phase_end("refit", self._refit))


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
    `compact` is `clear` with `memtriage.compact()` instead of `empty_cache()`; `memtriage-unprimed` is
    `memtriage` without priming.
    """
    if name.startswith("memtriage"):
        return WithMemtriage(model, optimizer, gradients, prime=name == "memtriage")

    def clear() -> None:
        if name != "none":
            fp8.clear_workspaces(model)
        if name == "clear-all":
            model.rotary.forward.cache_clear()

    give_back = memtriage.compact if name == "compact" else torch.cuda.empty_cache
    return AsNemoRL(model, optimizer, gradients, clear, host, give_back)


def _tell(report: PhaseReport, primed: Mapping[int, int] | None = None) -> None:
    """Where the time of a phase's end went, and what its beginning had primed."""
    parts = {"clear": report.cleared, "park": report.parked, "compact": report.compaction}
    told = ", ".join(f"{name} {part.seconds:.3f}" for name, part in parts.items() if part is not None)
    begun = f", primed {sum(primed.values()) / 1024**3:.2f}GB" if primed else ""
    print(f"end of {report.name}: {report.seconds:.3f} s ({told}){begun}", flush=True)
