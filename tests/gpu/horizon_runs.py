"""Twenty seeded runs with inputs of varying lengths, under lowered limits: predicted, then run on the GPU.

    horizon_runs.py predict FILE        what is predicted for each run, with its limit, as JSON
    horizon_runs.py measure FILE OUT    runs them on the GPU, eight processes at a time, and compares
    horizon_runs.py run SEED LIMIT      one run; prints what came of it

Runs with an even number are given a limit at which they are predicted to die, the others one that they are
predicted to survive, near what they need.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RUNS = 20
MIB = 1 << 20
ODD = MIB
"""Added to limits: what is reserved is a multiple of 2 MiB, so that no limit is met exactly."""
AT_A_TIME = 8
TRIES = 200
"""Limits that are tried to find one of the wanted kind."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int, activation: str) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = getattr(F, activation)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        count, length, width = hidden.shape
        parts = self.mixed(self.before(hidden)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.down(self.activation(self.up(self.between(hidden))))


class Language(nn.Module):
    def __init__(self, words: int, width: int, layers: int, activation: str) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, width // 64, activation) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def choices(seed: int) -> dict[str, Any]:
    """What a run is made of."""
    chance = random.Random(seed)
    longest = chance.choice([512, 1024, 2048])
    kinds = chance.choice([6, 12, 24])
    lengths = sorted(chance.randrange(16, longest) for _ in range(kinds))
    weights = [1 / (1 + place) for place in range(kinds)]  # long inputs are rare
    steps = chance.randrange(40, 120)
    return {
        "words": chance.choice([5000, 16000, 32000]),
        "width": chance.choice([256, 512, 768]),
        "layers": chance.choice([2, 4, 6]),
        "batch": chance.choice([4, 8, 12]),
        "activation": chance.choice(["gelu", "relu", "silu"]),
        "precision": chance.choice(["float32", "autocast", "bfloat16"]),
        "optimizer": chance.choice(["AdamW", "SGD"]),
        "clears": chance.choice(["before", "after"]),
        "keeps": chance.choice([False, True]),
        "micro": chance.choice([1, 1, 2]),
        "lengths": chance.choices(lengths, weights, k=steps),
    }


def build_of(seed: int) -> Any:
    """The build function of a run."""
    chosen = choices(seed)

    def build(device: Any) -> Any:
        torch.manual_seed(seed)
        model = Language(chosen["words"], chosen["width"], chosen["layers"], chosen["activation"]).to(device)
        if chosen["precision"] == "bfloat16":
            model = model.to(torch.bfloat16)
        optimizer = getattr(torch.optim, chosen["optimizer"])(model.parameters(), lr=1e-4)
        kept: list[Any] = [None]

        def step(length: int) -> None:
            if chosen["clears"] == "before":
                optimizer.zero_grad()
            for _ in range(chosen["micro"]):
                ids = torch.randint(0, chosen["words"], (chosen["batch"], length), device=device)
                with torch.autocast("cuda", torch.bfloat16, enabled=chosen["precision"] == "autocast"):
                    logits = model(ids)
                    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
                loss.backward()
                if chosen["keeps"]:
                    kept[0] = logits.detach()
                del logits, loss, ids
            optimizer.step()
            if chosen["clears"] == "after":
                optimizer.zero_grad()

        return model, optimizer, step

    return build


def predict(file: Path, gpu: str) -> None:
    from memtriage.prediction.gpu_kinds import machine
    from memtriage.prediction.many_steps.api import run_of
    from memtriage.prediction.many_steps.programs import ShapedBuild
    from memtriage.prediction.many_steps.run import MemoryLimits
    from memtriage.prediction.many_steps.shapes import inputs_of
    from memtriage.prediction.trace import trace

    predictions = []
    kind = machine(gpu)
    for seed in range(RUNS):
        program = ShapedBuild(build_of(seed), inputs_of(choices(seed)["lengths"], None))
        traced = trace(program, kind, (2, 11), len(program.run_shapes.traced))
        steps, _ = run_of(traced, program.run_shapes)
        limits = MemoryLimits(traced.settings, kind.memory, kind.memory - kind.outside, None)
        needed = max(outcome.peak_reserved for outcome in steps.outcomes(limits))
        chance = random.Random(1000 + seed)
        dies = seed % 2 == 0
        for _ in range(TRIES):
            share = chance.uniform(0.35, 0.95) if dies else chance.uniform(0.8, 1.02)
            limit = int(share * needed) // (2 * MIB) * 2 * MIB + ODD
            end = steps.end(replace(limits, limit=limit))
            if end.full_at is not None and end.full_at > 1 if dies else end.full_at is None:
                break
        predictions.append(
            {
                "seed": seed,
                "limit": limit,
                "steps": len(steps.shapes),
                "needed": needed,
                "full_at": end.full_at,
                "operator": None if end.failed is None else end.failed.operator,
                "flushed_at": end.flushed_at,
            }
        )
        print(json.dumps(predictions[-1]), flush=True)
        file.write_text(json.dumps(predictions, indent=1))


def run(seed: int, limit: int) -> None:
    """One run; prints the step in which it ran out of memory, None for none."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    lengths = choices(seed)["lengths"]
    full_at: int | None = None
    reserved = []
    try:
        full_at = 0
        built = build_of(seed)("cuda")
        for number, length in enumerate(lengths, 1):
            full_at = number
            built[2](length)
            reserved.append(torch.cuda.memory_reserved())
        full_at = None
    except torch.cuda.OutOfMemoryError:
        pass
    statistics = torch.cuda.memory_stats()
    print(
        json.dumps(
            {
                "seed": seed,
                "full_at": full_at,
                "retries": statistics["num_alloc_retries"],
                "peak_reserved": statistics["reserved_bytes.all.peak"],
                "reserved": reserved,
            }
        )
    )


def measure(file: Path, out: Path) -> int:
    predictions = json.loads(file.read_text())

    def one(prediction: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, __file__, "run", str(prediction["seed"]), str(prediction["limit"])]
        gpu = str(prediction["seed"] % torch.cuda.device_count())
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        )
        lines = done.stdout.splitlines()
        measured = json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}
        return {"predicted": prediction, "measured": measured}

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        pairs = list(pool.map(one, predictions))
    out.write_text(json.dumps(pairs))
    exact = safe_but_died = 0
    for pair in pairs:
        said, was = pair["predicted"]["full_at"], pair["measured"].get("full_at", "failed")
        exact += said == was
        safe_but_died += said is None and was is not None
        print(
            f"run {pair['predicted']['seed']:>2} of {pair['predicted']['steps']:>3} steps, limit "
            f"{pair['predicted']['limit'] >> 20:>6} MiB: predicted {said}, measured {was}"
        )
    print(f"{exact} of {len(pairs)} exact, {safe_but_died} called safe that died")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "predict":
        predict(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "h100")
    elif sys.argv[1] == "measure":
        sys.exit(measure(Path(sys.argv[2]), Path(sys.argv[3])))
    else:
        run(int(sys.argv[2]), int(sys.argv[3]))
