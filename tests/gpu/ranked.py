"""A Llama of about a billion parameters for many ranks: a build function, and a script that measures it.

The build function's wrapping is named by the environment variable RANKED_KIND: `ddp`, `views` (DDP whose
gradients are views of its buckets) or `fsdp2`.

    ranked.py measure FOLDER        under torchrun: each rank writes what it measured to RANK.json there
    ranked.py predict RANK          prints what is predicted for that rank, as JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, FEED, HEADS, LAYERS, WORDS = 2048, 8192, 16, 16, 32000
BATCH, LENGTH = 4, 1024
STEPS = 3
RANKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, FEED, bias=False)
        self.up = nn.Linear(WIDTH, FEED, bias=False)
        self.down = nn.Linear(FEED, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*hidden.shape[:2], HEADS, WIDTH // HEADS)
        parts = self.mixed(self.before(hidden)).chunk(3, dim=-1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        normed = self.between(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), ids.flatten())


def wrapped(model: Model, kind: str) -> nn.Module:
    if kind == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    model = model.to(torch.bfloat16)
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=kind == "views")


def build(device: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    with torch.device(device):
        model = wrapped(Model(), os.environ["RANKED_KIND"])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(0, WORDS, (BATCH, LENGTH), device=device)
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def outside() -> int:
    """Bytes that are in use on the device and are not the allocator's; the process must be alone there."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def communicate(group: Any = None) -> None:
    """Every kind of collective that DDP and FSDP2 run, once each."""
    parts = torch.ones(RANKS, 1 << 20, device="cuda")
    whole = torch.empty(dist.get_world_size(group) << 20, device="cuda")
    dist.all_reduce(parts, group=group)
    dist.all_gather_into_tensor(whole, parts[0], group=group)
    dist.reduce_scatter_tensor(parts[0], whole, group=group)
    dist.broadcast(parts, 0, group=group)


def measure(folder: Path) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    (weight @ weight).sum().backward()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"kind": os.environ["RANKED_KIND"], "outside": {"before the group": outside()}}
    del weight
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    dist.init_process_group("nccl")
    _, _, step = build(device)
    found["outside"]["after build"] = outside()
    found["steps"] = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        found["steps"].append(
            {
                "peak_allocated": torch.cuda.max_memory_allocated(),
                "peak_reserved": torch.cuda.max_memory_reserved(),
                "end_allocated": torch.cuda.memory_allocated(),
                "outside": outside(),
            }
        )
    communicate()
    torch.cuda.synchronize()
    found["outside"]["after all collectives"] = outside()
    for number in (2, 3):
        communicate(dist.new_group())
        torch.cuda.synchronize()
        found["outside"][f"after the same in group {number}"] = outside()
    found["torch"], found["nccl"] = torch.__version__, torch.cuda.nccl.version()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def predict(rank: int) -> None:
    """Both what NCCL's watchdog may do with DDP's first bucket: see `Collectives`."""
    import memtriage
    from memtriage.prediction.distributed import collectives

    found = {}
    for name, until in (("held", collectives.HOLDS_UNTIL_STEP), ("let go", 0)):
        collectives.HOLDS_UNTIL_STEP = until
        prediction = memtriage.predict(build, steps=STEPS, world_size=RANKS, rank=rank)
        found[name] = {
            "steps": [
                {what: getattr(step, what) for what in ("peak_allocated", "peak_reserved", "end_allocated")}
                for step in prediction.steps
            ],
            "outside": prediction.outside_allocator,
            "seconds": prediction.seconds,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]))
    else:
        predict(int(sys.argv[2]))
