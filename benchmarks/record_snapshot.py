"""Records the snapshot that `benchmarks/snapshot.py` reads: GPT-2 small trained with varying lengths.

    python benchmarks/record_snapshot.py FILE [--steps N] [--events N]

Needs a CUDA device with 24 GB and the package `transformers`. Lengths are random from 64 to 1,023 tokens, in
batches of 4, with a fixed seed; Python stacks are kept. Of 430 steps the last 1,300,000 events stay,
about 310 steps. The file has 119 MB then, and 6 MB as .xz.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Final

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SHORTEST: Final = 64
LONGEST: Final = 1024
BATCH: Final = 4


def main() -> None:
    args = arguments()
    random.seed(0)
    torch.manual_seed(0)
    config = GPT2Config()
    model = GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.cuda.memory._record_memory_history(max_entries=args.events, stacks="python")
    for _ in range(args.steps):
        length = random.randrange(SHORTEST, LONGEST)
        ids = torch.randint(0, config.vocab_size, (BATCH, length), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(args.file))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=430)
    parser.add_argument("--events", type=int, default=1_300_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
