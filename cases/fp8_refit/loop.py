"""Steps of reinforcement learning: score, train in FP8, offload, refit over CUDA IPC, generate (README.md).

python loop.py --precision fp8 --treatment none
memtriage run loop.py --precision fp8 --treatment memtriage
torchrun --nproc-per-node 2 loop.py ...
python loop.py --device cpu --tiny --library standin --engine inside
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import engine
import fp8
import memtriage
import refit
import treatment
from lengths import MicroBatch, micro_batches
from memtriage.prove.statistics import ratio
from model import TINY, Decoder, Shape
from optim import Gradients, make_optimizer
from who_holds import write_tables

_GB: Final = 1024**3
_CLIP: Final = 0.2
"""Of the ratio of probabilities, as in PPO and GRPO."""


def main() -> None:
    """Run the steps that the command line asks for."""
    asked = arguments()
    # Of the same size as without it; torch asks for it where the order of sums is to be fixed.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(asked.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    generation = engine.make(device, asked.engine)
    if ranks > 1:
        dist.init_process_group("nccl", device_id=device)
    try:
        Trainer(asked, device, rank, ranks, generation).run()
    finally:
        generation.close()
        if ranks > 1:
            dist.destroy_process_group()


class Trainer:
    """One rank's model and optimizer, and the steps with them."""

    def __init__(
        self,
        asked: argparse.Namespace,
        device: torch.device,
        rank: int,
        ranks: int,
        generation: engine.Generation,
    ) -> None:
        torch.manual_seed(asked.seed)
        if not asked.any_order:
            # Rows are compared to the last bit; flash attention's backward pass else adds up in any order.
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        self.asked, self.device, self.rank, self.ranks = asked, device, rank, ranks
        self.generation = generation
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        quantized = asked.precision == "fp8"
        library = fp8.library(asked.library)
        shape = TINY if asked.tiny else Shape()
        shape = dataclasses.replace(shape, layers=asked.layers or shape.layers)
        self.vocabulary = shape.vocabulary
        self.model = Decoder(shape, fp8.blocks(library, quantized, device, dtype), device, dtype)
        if quantized:
            fp8.convert(library, self.model)
        self.quantizing: Callable[[], AbstractContextManager[Any]] = fp8.context(
            library, quantized, asked.recipe
        )
        parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(library, parameters)
        self.gradients = Gradients(parameters)
        self.treatment = self._treatment(asked.treatment)
        self.clock = _Clock(device)
        self.turns: list[float] = []
        if asked.against:
            self.treatment = treatment.InTurns((self.treatment, self._treatment(asked.against)))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        count = sum(parameter.numel() for parameter in parameters)
        self._say(f"{count / 1e9:.2f} billion parameters, {library}, {asked.precision}, {asked.treatment}")

    def run(self) -> None:
        """All steps."""
        for number in range(1, self.asked.steps + 1):
            begun = time.perf_counter()
            loss, parts = self._step(number)
            seconds = time.perf_counter() - begun
            memtriage.mark("step complete")
            told = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
            self._say(f"step {number}: {seconds:.3f} s ({told}), loss {loss!r}")
            if self.asked.against and number > 1:
                self._tell_turn(number - 2)
        if self.asked.against:
            self._compare_turns()

    def _treatment(self, name: str) -> treatment.Treatment:
        return treatment.make(name, self.model, self.optimizer, self.gradients)

    def _step(self, number: int) -> tuple[float, dict[str, float]]:
        clock = self.clock
        clock.laps = {}
        if self.asked.against and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # each turn has its own
        batches = self.batches(number)
        self.treatment.weights_back()
        clock.lap("weights back")
        old = self.score(batches)
        clock.lap("score")
        self.treatment.states_back()
        clock.lap("states back")
        loss = self.train(batches, old)
        clock.lap("train")
        self.turns.append(clock.last)
        self._tell_holders(number, "after-training")
        self.treatment.after_training()
        clock.lap("offload states")
        sent = self.send_weights()
        clock.lap("refit")
        self.treatment.after_refit()
        clock.lap("offload weights")
        self._after_refit(number)
        clock.lap("report")
        free = self.generation.call("wake_cache")
        total = self.generation.call("generate")
        self.generation.call("sleep")
        if total != sent:
            raise RuntimeError(f"the engine's weights sum to {total}, those of the trainer to {sent}")
        clock.lap("generate")
        if free:
            self._say(f"step {number}: the engine found {free / _GB:.2f}GB free for its cache")
        return loss, clock.laps

    def batches(self, number: int) -> list[MicroBatch]:
        asked = self.asked
        # Where two treatments take turns, each has the same work.
        seed = (asked.seed * 1000 + (0 if asked.against else number)) * self.ranks + self.rank
        warms_up = number <= (treatment.InTurns.WARM_UP if asked.against else 1)
        count = asked.first_step if warms_up and asked.first_step else asked.micro_batches
        return micro_batches(count, asked.tokens, asked.longest, asked.multiple, seed)

    def score(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probabilities before the update, on the host, as the other fields of the samples."""
        self.model.eval()
        with torch.no_grad():
            return [
                self._log_probabilities(self._tokens(batch), first=index == 0).cpu()
                for index, batch in enumerate(batches)
            ]

    def train(self, batches: list[MicroBatch], old: list[Tensor]) -> float:
        self.model.train()
        losses = torch.zeros(len(batches), device=self.device)
        for index, (one, before) in enumerate(zip(batches, old, strict=True)):
            tokens = self._tokens(one)
            now = self._log_probabilities(tokens, first=index == 0)
            ratio = (now - before.to(self.device, non_blocking=True)).exp()
            advantage = torch.linspace(-1.0, 1.0, one.sequences, device=self.device)[:, None]
            clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() - 0.01 * now.mean()
            (loss / len(batches)).backward()
            losses[index] = loss.detach()
        if self.ranks > 1:
            dist.all_reduce(self.gradients.buffer, op=dist.ReduceOp.AVG)
        norm = torch.linalg.vector_norm(self.gradients.buffer, dtype=torch.float32)
        self.gradients.buffer.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return losses.mean().item()

    def _log_probabilities(self, tokens: Tensor, first: bool) -> Tensor:
        with self.quantizing():
            logits = self.model(tokens, first)
        sequences, length = tokens.shape
        known = logits[:, :-1].float().flatten(0, 1)
        lost = F.cross_entropy(known, tokens[:, 1:].flatten(), reduction="none")
        return -lost.view(sequences, length - 1)

    def _tokens(self, one: MicroBatch) -> Tensor:
        chance = torch.Generator().manual_seed(one.seed)
        tokens = torch.randint(self.vocabulary, (one.sequences, one.length), generator=chance)
        return tokens.to(self.device)

    def send_weights(self) -> float:
        """Send the weights; returns their sum, which the engine is to find too."""
        weights = {name: one.detach() for name, one in self.model.named_parameters()}
        self.generation.call("wake_weights", refit.pieces_of(weights.items()))
        refit.stream(weights, self.generation, self.asked.bucket << 20)
        return engine.sum_of(weights, self.device)

    def _after_refit(self, number: int) -> None:
        """The instant that the table is about."""
        memtriage.mark("after refit")
        if self.device.type != "cuda":
            return
        allocated = torch.cuda.memory_allocated(self.device) / _GB
        reserved = torch.cuda.memory_reserved(self.device) / _GB
        self._say(
            f"GPU Memory after refit complete: {allocated:.2f}GB allocated, {reserved:.2f}GB reserved",
        )
        peaks = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        self._say(f"step {number}: at most {peaks[0] / _GB:.2f}GB allocated, {peaks[1] / _GB:.2f}GB reserved")
        self._tell_holders(number, "after-refit")

    def _tell_holders(self, number: int, instant: str) -> None:
        asked = self.asked
        if asked.who and number == asked.steps and self.device.type == "cuda":
            row = f"{asked.precision}-{asked.treatment}"
            write_tables(f"{asked.who}.{row}.{instant}.{self.rank}.json", f"{row} {instant}")

    def _tell_turn(self, turn: int) -> None:
        """How long a turn took, and what its training reserved."""
        name = (self.asked.treatment, self.asked.against)[treatment.InTurns.whose(turn)]
        told = f"turn {turn}: {name} {self.turns[turn + 1] - self.turns[turn]:.3f} s"
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(self.device) / _GB
            told += f", {peak:.2f}GB reserved at the peak"
        self._say(told)

    def _compare_turns(self) -> None:
        """The ratio of each pair of neighboring turns: `--against` to `--treatment`."""
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn, (begun, ended) in enumerate(itertools.pairwise(self.turns)):
            if turn >= treatment.InTurns.WARM_UP:
                seconds[treatment.InTurns.whose(turn)].append(ended - begun)
        estimate = ratio([seconds[1]], [seconds[0]])
        if estimate is None:
            return
        middle, interval = estimate
        told = (
            ""
            if interval is None
            else (f", {100 * interval.confidence:.0f} % interval {interval.low:.4f} to {interval.high:.4f}")
        )
        pairs = min(map(len, seconds))
        names = f"{self.asked.against} / {self.asked.treatment}"
        self._say(f"{names}: {middle:.4f}{told}, the median of {pairs} pairs of turns")

    def _say(self, text: str) -> None:
        print(f"[rank {self.rank}] {text}", flush=True)


class _Clock:
    """Times the parts of a step, each until the device has done its work."""

    def __init__(self, device: torch.device) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()
        self._device = device

    def lap(self, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now


def arguments(*flags: str) -> argparse.Namespace:
    """What the command line asks for.

    Args:
        flags: more than the loop itself knows.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--precision", choices=("bf16", "fp8"), default="fp8")
    add("--treatment", choices=treatment.TREATMENTS, default="none")
    add("--against", choices=treatment.TREATMENTS, help="in turns with --treatment: the ratio of their times")
    add("--library", choices=fp8.LIBRARIES, help="by default TransformerEngine if installed, else torchao")
    add("--recipe", choices=("delayed", "current", "block"), default="delayed", help="of TransformerEngine")
    add("--steps", type=int, default=3)
    add("--layers", type=int, help="20 by default, for 2.2 billion parameters")
    add("--micro-batches", type=int, default=40, help="of one step")
    add("--first-step", type=int, help="micro-batches of the first step, which only warms up")
    add("--tokens", type=int, default=8192, help="of one micro-batch, at most")
    add("--longest", type=int, default=8192, help="longest sequence")
    add("--multiple", type=int, default=64, help="sequences are padded to a multiple of it")
    add("--bucket", type=int, default=1024, help="MiB of a refit bucket")
    add("--any-order", action="store_true", help="sums in any order: losses differ in their last digits")
    add("--seed", type=int, default=1)
    add("--device", default="cuda")
    add("--engine", choices=engine.PLACES, default="process", help="where generation runs")
    add("--tiny", action="store_true", help="a decoder for the CPU")
    add("--quick", action="store_true", help="2 layers, 6 micro-batches: to see it run, not to measure")
    add("--who", metavar="PREFIX", help="in the last step write tables of what holds memory to PREFIX.*.json")
    for flag in flags:
        add(flag, action="store_true")
    asked = parser.parse_args()
    if asked.tiny:
        asked.tokens, asked.longest, asked.multiple, asked.bucket = 256, 128, 16, 1
        asked.micro_batches = min(asked.micro_batches, 4)
    if asked.quick:
        asked.layers, asked.micro_batches = 2, 6
    return asked


if __name__ == "__main__":
    main()
