"""What `test_faults.py` runs in a process of its own, which is killed.

python fault_program.py CHECKPOINT
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from memtriage import OffloadedAdamW
from memtriage.treat.offload.arithmetic import Arithmetic
from memtriage.treat.offload.pipeline import Job
from support.offload import give_gradients, masters_of, parameters


def killed(checkpoint: str) -> None:
    weights = parameters()
    optimizer = OffloadedAdamW(weights, tile_elements=128, ring_depth=2)
    for step in range(2):
        give_gradients(weights, masters_of(weights), seed=step)
        optimizer.step()
    torch.save(
        {"weights": [weight.detach() for weight in weights], "optimizer": optimizer.state_dict()}, checkpoint
    )
    calls = count(1)
    stepping = Arithmetic.stepping

    def deadly(*arguments: Any) -> Job:
        if next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return stepping(*arguments)

    Arithmetic.stepping = deadly
    give_gradients(weights, masters_of(weights), seed=2)
    optimizer.step()


if __name__ == "__main__":
    killed(sys.argv[1])
