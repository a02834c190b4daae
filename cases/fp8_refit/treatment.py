"""What happens to the trainer's memory around the refit: as NeMo-RL does it, or with `memtriage.phase`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

import torch
from torch import Tensor, nn

import fp8
import memtriage
from memtriage.treat.phase import PhaseReport
from optim import Gradients, Offload, pinned, state_tensors

TREATMENTS: Final = ("none", "clear", "clear-all", "compact", "memtriage")


class Treatment(Protocol):
    """The moves of one step, in order: weights back, training, refit."""

    def weights_back(self) -> None:
        """The weights are on the GPU afterwards."""
        ...

    def training(self) -> AbstractContextManager[None]:
        """Around training: optimizer states come, and the gradients' buffer, all zero; both go again."""
        ...

    def refit(self) -> AbstractContextManager[None]:
        """Around the refit: at its end the weights leave the GPU."""
        ...


class AsNemoRL:
    """The moves of `offload_before_refit` and `offload_after_refit`, with page-locked copies.

    Args:
        clear: what lets go of caches before memory is given back, at both.
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

    @contextmanager
    def training(self) -> Iterator[None]:
        self._states.to_device()
        self._gradients.restore()
        yield
        self._gradients.release()
        self._clear()
        self._states.to_host(state_tensors(self._optimizer))
        gc.collect()
        self._give_back()

    @contextmanager
    def refit(self) -> Iterator[None]:
        yield
        self._weights.to_host(self._model.parameters())
        self._clear()
        gc.collect()
        self._give_back()


class WithMemtriage:
    """The same moves by `memtriage.phase`: it clears known caches, parks, and compacts what is left."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients
        self._around_training = memtriage.PhasePolicy(unpark=(optimizer,), park=(optimizer,))
        # Training has left no caches: what the refit makes is its buckets.
        self._around_refit = memtriage.PhasePolicy(clear=False, park=("parameters", model))
        self._parked = False

    def weights_back(self) -> None:
        if self._parked:
            memtriage.unpark("parameters", self._model)
            self._parked = False

    @contextmanager
    def training(self) -> Iterator[None]:
        with memtriage.phase("training", self._around_training) as phase:
            self._gradients.restore()
            yield
            self._gradients.release()
        _tell(phase.report)

    @contextmanager
    def refit(self) -> Iterator[None]:
        with memtriage.phase("refit", self._around_refit) as phase:
            yield
        self._parked = True
        _tell(phase.report)


def make(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: Gradients,
    host: Callable[[int], Tensor] = pinned,
) -> Treatment:
    """The treatment of a name of `TREATMENTS`.

    `clear` is NeMo-RL's `force_clear_fp8_caches`; `clear-all` its `clear_memory_caches_before_refit` besides;
    `compact` is `clear` with `memtriage.compact()` in place of `empty_cache()`.
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
