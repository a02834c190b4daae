"""DeepSpeed's ZeRO on small layers, and the bytes of a rank's tensors in one step.

As a script it is one of the ranks: `zero_jobs.py RANK RANKS PORT` prints its bytes in each job, over gloo on
the CPU. Its build function prints those of a predicted rank.
"""

import json
import os
import sys
from contextlib import nullcontext

import torch
from torch import nn

from support.meshes import REPEATS, ROWS, WIDTH, Live, storages

MICRO_BATCHES = "two micro-batches"
JOBS = [
    (stage, dtype, way)
    for stage in (1, 2, 3)
    for dtype in (torch.bfloat16, torch.float32)
    for way in ("", MICRO_BATCHES, "zero.Init")
    if stage == 3 or way != "zero.Init"
]
"""Of each job the stage, the precision of its weights, and what else it does."""


def layers():
    """Without a norm, whose statistics in bf16 are larger on a GPU."""
    rise, fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(rise, nn.GELU(), fall)


def engine_for(stage, dtype, way, sizes):
    """Return the step of an engine, which writes what it keeps into `sizes`."""
    import deepspeed

    micro_batches = 2 if way == MICRO_BATCHES else 1
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": dtype is torch.bfloat16},
        # One by one: on a GPU torch's own choice makes temporary tensors of other sizes.
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "foreach": False}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100_000,
            "allgather_bucket_size": 100_000,
            "stage3_prefetch_bucket_size": 100_000,
            "stage3_param_persistence_threshold": 200,
        },
    }
    live = Live()
    with live:
        with deepspeed.zero.Init(config_dict_or_path=config) if way == "zero.Init" else nullcontext():
            model = nn.Sequential(*[layers() for _ in range(3)])
        engine, *_ = deepspeed.initialize(model=model, config=config)

    def step():
        live.most = 0
        with live:
            for _ in range(micro_batches):
                batch = torch.ones(ROWS, WIDTH, device=engine.device, dtype=dtype)
                loss = engine(batch).float().pow(2).sum()
                engine.backward(loss)
                sizes["after backward"] = live.alive()
                engine.step()
                del batch, loss
        sizes["at once"] = live.most
        sizes["left"] = live.alive()
        zero = engine.optimizer
        sizes["parameters"] = storages(getattr(each, "ds_tensor", each) for each in model.parameters())
        masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        sizes["masters"] = storages(masters)
        states = (state for held in zero.optimizer.state.values() for state in held.values())
        sizes["states"] = storages(state for state in states if state.dim())

    return step


def print_jobs(rank, repeats):
    """Print the bytes in each job, the least of its last steps."""
    found = {}
    for stage, dtype, way in JOBS:
        sizes = {}
        step = engine_for(stage, dtype, way, sizes)
        step()
        followed = []
        for _ in range(repeats):
            step()
            followed.append(dict(sizes))
        name = f"ZeRO-{stage} {dtype} {way}".strip()
        found[name] = {kind: min(each[kind] for each in followed) for kind in sizes}
    print(f"RESULT{json.dumps({rank: found})}", flush=True)


def build(device):
    print_jobs(int(os.environ["RANK"]), 1)
    model = nn.Linear(1, 1, device=device)  # of the engines there are many
    return model, torch.optim.SGD(model.parameters()), lambda: None


def main(rank, ranks, port):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    import deepspeed

    # Compiling it takes minutes, and nothing here needs it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    print_jobs(rank, REPEATS)  # for an instant gloo's threads hold what they have sent


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
