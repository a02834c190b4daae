"""What `test_faults.py` runs in processes of their own: one is killed, one may not have more memory.

python fault_program.py killed CHECKPOINT
python fault_program.py limited DIRECTORY
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from torch.nn import Parameter

from memtriage import OffloadedAdamW
from memtriage.treat.offload.arithmetic import Arithmetic
from memtriage.treat.offload.pipeline import Job
from support.offload import give_gradients, masters_of, parameters

SPARE = 64 << 20  # address space left to the limited process, bytes: less than the masters take


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


def limited(_: str) -> None:
    weight = Parameter(torch.ones(20_000_000, dtype=torch.bfloat16))
    small = Parameter(torch.ones(1000))
    OffloadedAdamW([small], tile_elements=128).close()
    limit = psutil.Process().memory_info().vms + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        OffloadedAdamW([weight], tile_elements=128)
    except MemoryError as error:
        said = str(error)
    small.grad = torch.ones(1000)
    optimizer = OffloadedAdamW([small], tile_elements=128)
    optimizer.step()
    told = {
        "error": said,
        "weights_untouched": bool((weight[::1000] == 1).all()),
        "smaller_one_works": float(small[0]) < 1.0,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    {"killed": killed, "limited": limited}[sys.argv[1]](sys.argv[2])
