"""The plain rows of the case without a GPU: traced with memtriage.predict, replayed through its allocator.

    python simulate.py --layers 8 --micro-batches 12 --precision fp8 --treatment clear

The FP8 layers are the stand-in's, whose weights are kept as TransformerEngine keeps them, and there is no
second process; the rest is the case's own loop. Printed: what is allocated and reserved after each refit, and
the most that was reserved in the step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import loop
import treatment
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.model.units import size
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, AllocationTrace
from memtriage.prediction.trace import trace

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
        trainer = loop.Trainer(asked, torch.device(device), 0, 1, _NoEngine())
        trainer.treatment = treatment.make(
            asked.treatment, trainer.model, trainer.optimizer, trainer.gradients, host=_host
        )
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


if __name__ == "__main__":
    arguments = loop.arguments()
    arguments.library = "standin"
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    for number, after in enumerate(after_refits(arguments, settings), 1):
        print(
            f"step {number}: {size(after.allocated)} allocated, {size(after.reserved)} reserved after refit, "
            f"{size(after.peak)} reserved at the peak",
            flush=True,
        )
