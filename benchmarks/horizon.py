"""How long `memtriage.horizon` takes for a run of many allocations and frees. Needs no GPU.

    python benchmarks/horizon.py [--events N] [--layers N] [--json FILE]

A language model of GPT-2's kind, bf16 autocast, AdamW; batches of 8, whose lengths are drawn at random.

30 lengths        each is traced, and states of the allocator recur.
1,000 lengths     16 are traced, 5 in addition as a check, and the sizes of the others derived.
none recurs       30 lengths again, but no state is looked up: every event is simulated, as in a program
                  whose memory grows without end.

Of each run: its steps and events, how many events went through the simulator, the seconds of the whole
prediction (tracing included) and of the simulation alone. Seconds are those of this process on a core, so
that neighbors count as little as can be.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import memtriage
from memtriage.prediction.many_steps.course import MOST_BLOCKS, RunCourse

SEED: Final = 0
BATCH: Final = 8
WIDTH: Final = 768
WORDS: Final = 50257
LONGEST: Final = 1024
NEVER: Final = -1
"""Blocks of states that are kept, so that none is known again."""
CASES: Final = {"30 lengths": 30, "1,000 lengths": 1000, "none recurs": 30}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        count, length, width = hidden.shape
        parts = self.mixed(self.before(hidden)).view(count, length, 3, width // 64, 64)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.between(hidden))))


def build_of(layers: int) -> Any:
    """The build function of such a model."""

    def build(device: Any) -> Any:
        words = nn.Embedding(WORDS, WIDTH)
        blocks = nn.Sequential(*(Block() for _ in range(layers)))
        model = nn.Sequential(words, blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(length: int) -> None:
            ids = torch.randint(0, WORDS, (BATCH, length), device=device)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


@dataclass(frozen=True, slots=True)
class Timed:
    """What one horizon took."""

    steps: int
    events: int
    simulated: int
    seconds: float
    simulation_seconds: float
    peak_reserved: int
    error: float | None


def timed(build: Any, lengths: Sequence[int], most_blocks: int) -> Timed:
    """Predict a run, and follow the simulation in it."""
    followed: list[tuple[RunCourse, float]] = []

    class Followed(RunCourse):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, most_blocks)

        def run(self, steps: Any) -> Any:
            began = time.process_time()
            yield from super().run(steps)
            followed.append((self, time.process_time() - began))

    began = time.process_time()
    with mock.patch("memtriage.prediction.many_steps.run.RunCourse", Followed):
        horizon = memtriage.horizon(build, lengths, gpu="h200")
    took = time.process_time() - began
    run, seconds = followed[0]  # the others try other settings and orders
    return Timed(
        horizon.steps, run.stood_for, run.simulated, took, seconds, horizon.peak_reserved, horizon.error
    )


def drawn(kinds: int, steps: int) -> list[int]:
    """Lengths of so many kinds, in random order, each at least once where there are steps enough."""
    chance = random.Random(SEED)
    lengths = chance.sample(range(16, LONGEST), kinds)
    return [*lengths, *chance.choices(lengths, k=max(0, steps - kinds))][:steps]


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=50_000_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    build = build_of(chosen.layers)
    few = timed(build, drawn(4, 20), MOST_BLOCKS)
    steps = chosen.events // (few.events // few.steps)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {chosen.layers} layers")
    found = {}
    for name, kinds in CASES.items():
        most_blocks = NEVER if name == "none recurs" else MOST_BLOCKS
        result = found[name] = timed(build, drawn(kinds, steps), most_blocks)
        error = "" if result.error is None else f", derived sizes {result.error:.2%} off at most"
        print(
            f"{name:14} {result.steps:,} steps, {result.events:,} events, {result.simulated:,} simulated: "
            f"{result.seconds:.1f} s, of which the simulation {result.simulation_seconds:.1f} s{error}",
            flush=True,
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({name: asdict(result) for name, result in found.items()}, indent=1))


if __name__ == "__main__":
    main()
