"""The rows of the case without a GPU: traced with memtriage.predict, replayed through its allocator.

    python simulate.py --layers 8 --micro-batches 12 --precision fp8 --treatment clear
    python simulate.py --first-step 4 --steps 4 --treatment memtriage --seed 2

The FP8 layers are the stand-in's, whose weights are kept as TransformerEngine keeps them, and there is no
second process; the rest is the case's own loop. Memtriage's moves are those of NeMo-RL, after which nothing
is left, and its own priming. With `--apart` the FP8 copies of weights are in segments of their own.
Printed: what is allocated and reserved after each refit, and the most that was reserved in the step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import fp8
import loop
import treatment
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.model.units import size
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, AllocationTrace
from memtriage.prediction.trace import trace
from memtriage.treat.phase_needs import Need, in_turn
from optim import state_tensors

_TORCH: Final = (2, 11)


class _NoEngine:
    """In place of the other process."""

    def call(self, method: str, *arguments: Any) -> Any:
        return None

    def send(self, bucket: Tensor, pieces: list[Any]) -> None:
        """The bucket goes nowhere."""

    def acknowledged(self) -> None:
        """At once."""

    def close(self) -> None:
        """Nothing to end."""


class _TensorBlocks:
    """Blocks for priming, as tensors: the trace sees no others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, size: int) -> list[Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self._device)]

    def free(self, block: list[Tensor]) -> None:
        block.clear()

    def give_back(self) -> None:
        """Nothing fails in a trace."""

    def forget_peaks(self) -> None:
        """The trace has none."""


class _AsMemtriage(treatment.AsNemoRL):
    """What memtriage's phases do to memory: everything leaves, and training is primed when it begins again.

    Parking itself needs a device; NeMo-RL's moves request and free the same storages.
    """

    def __init__(self, trainer: loop.Trainer, prime: bool) -> None:
        model, optimizer = trainer.model, trainer.optimizer

        def clear() -> None:
            fp8.clear_workspaces(model)
            model.rotary.forward.cache_clear()
            torch._C._cuda_clearCublasWorkspaces()

        super().__init__(model, optimizer, trainer.gradients, clear, _host, torch.cuda.empty_cache)
        self._device, self._prime = trainer.device, prime
        self._need = Need()

    def weights_back(self) -> None:
        super().weights_back()
        # Its states are on the host by now.
        coming = sum(state.numel() * state.element_size() for state in state_tensors(self._optimizer))
        self._need.begin(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), coming)
        if self._prime:
            blocks = self._need.blocks(torch.cuda.memory_reserved(), *torch.cuda.mem_get_info())
            in_turn(blocks, _TensorBlocks(self._device))

    def after_training(self) -> None:
        self._need.end(torch.cuda.max_memory_allocated())
        super().after_training()


def _in_memory_of_their_own(make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes FP8 copies allocates for another stream, which nothing else uses."""
    stream = torch.cuda.Stream()

    def made(*asked: Any) -> Any:
        with torch.cuda.stream(stream):
            return make(*asked)

    return made


class Reading(NamedTuple):
    """Bytes allocated and reserved at an instant, and the most that was reserved since the reading before."""

    allocated: int
    reserved: int
    peak: int


def after_refits(asked: argparse.Namespace, conf: str = "") -> list[Reading]:
    """After each step's refit; peaks are those of the whole step.

    Args:
        asked: arguments of the loop.
        conf: settings of the allocator, as in `PYTORCH_CUDA_ALLOC_CONF`.
    """
    kind = machine("h200")
    tape = trace(_program(asked), kind, _TORCH, asked.steps)
    counters = _at_releases(tape.recording, Simulator(parse_conf(conf, _TORCH), device_memory=kind.memory))
    # The cache is emptied once before the first step, then twice in each: after training, after the refit.
    return [
        last._replace(peak=max(trained.peak, last.peak))
        for trained, last in zip(counters[1::2], counters[2::2], strict=True)
    ]


def _program(asked: argparse.Namespace) -> Callable[[Any], tuple[Any, Any, Callable[[], None]]]:
    def build(device: Any) -> tuple[Any, Any, Callable[[], None]]:
        if asked.apart:
            fp8.StandInLinear._make = _in_memory_of_their_own(fp8.StandInLinear._make)
        trainer = loop.Trainer(asked, torch.device(device), 0, 1, _NoEngine())
        trainer.treatment = _treatment(asked.treatment, trainer)
        number = 0

        def step() -> None:
            nonlocal number
            number += 1
            batches = trainer.batches(number)
            trainer.treatment.weights_back()
            old = trainer.score(batches)
            trainer.treatment.states_back()
            trainer.train(batches, old)
            trainer.treatment.after_training()
            trainer.send_weights()
            trainer.treatment.after_refit()

        return trainer.model, trainer.optimizer, step

    return build


def _treatment(name: str, trainer: loop.Trainer) -> treatment.Treatment:
    if name.startswith("memtriage"):
        return _AsMemtriage(trainer, prime=name == "memtriage")
    return treatment.make(name, trainer.model, trainer.optimizer, trainer.gradients, host=_host)


def _host(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _at_releases(recording: AllocationTrace, simulator: Simulator) -> list[Reading]:
    """Whenever the cache has been emptied."""
    live: dict[int, Any] = {}
    releases = set(recording.releases)
    rows = []
    peak = 0
    for position, event in enumerate([*recording.events, None]):
        if position in releases:
            simulator.empty_cache()
            rows.append(Reading(simulator.allocated, simulator.reserved, peak))
            peak = simulator.reserved
        if event is None:
            break
        if event.size == FREE:
            simulator.free(live.pop(event.block))
        else:
            live[event.block] = simulator.malloc(event.size, recording.blocks[event.block].stream)
            peak = max(peak, simulator.reserved)
    return rows


def arguments() -> argparse.Namespace:
    """What the command line asks for: of the loop, and `--apart`."""
    asked = loop.arguments("--apart")
    asked.library = "standin"
    return asked


if __name__ == "__main__":
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    for number, after in enumerate(after_refits(arguments(), settings), 1):
        print(
            f"step {number}: {size(after.allocated)} allocated, {size(after.reserved)} reserved after refit, "
            f"{size(after.peak)} reserved at the peak",
            flush=True,
        )
