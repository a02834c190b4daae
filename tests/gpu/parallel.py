"""A Llama in two parts, by tensor, by pipeline stage or by sequence: a build function, and what measures it.

The environment variable PARALLEL_KIND names the way: `tp` (DTensor, with sequence parallel), `pp` (1F1B, four
micro-batches), `fsdp-tp` and `pp-fsdp` (both with FSDP2, on four GPUs), `gpipe`, `cp` (context parallel),
`fsdp1` (bf16), `fsdp1-offload`, `selective` (FSDP2 with selective checkpointing), or `zero1` to `zero3`
(DeepSpeed).

    parallel.py measure FOLDER              under torchrun: each rank writes KIND-RANK.json there
    parallel.py predict RANK                prints what is predicted for that rank, as JSON
    parallel.py compare FOLDER [KIND ...]   predicts and measures, and prints both for each rank and step
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peaks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, FEED, HEADS, LAYERS, WORDS = 2048, 5632, 16, 8, 32000
BATCH, LENGTH = 4, 2048
MICRO_BATCHES = 4
STEPS = 3
PARTS = 2
"""Into which tensors, stages or sequences are split."""
AT_A_TIME = 3
"""Kinds that share the GPUs: each takes up to 20 GiB."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, FEED, bias=False), nn.Linear(WIDTH, FEED, bias=False)
        self.down = nn.Linear(FEED, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.before(hidden))
        return hidden + self.feed(self.between(hidden))


class Llama(nn.Module):
    """The whole model, or the layers of one stage of two."""

    def __init__(self, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if first else None
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS if first and last else LAYERS // 2))
        self.norm = nn.RMSNorm(WIDTH) if last else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.words is not None:
            hidden = self.words(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        if self.norm is None or self.head is None:
            return hidden
        return self.head(self.norm(hidden))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def build_tp(device: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (dist.get_world_size() // PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    model, sharded, mesh = _llama(device), mesh["dp"], mesh["tp"]
    parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "before": SequenceParallel(),
                "attention": PrepareModuleInput(**whole),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "between": SequenceParallel(),
                "feed": PrepareModuleInput(**whole),
                "feed.gate": ColwiseParallel(),
                "feed.up": ColwiseParallel(),
                "feed.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return trained(_sharded(model, sharded), device)


def _llama(device: Any, **parts: bool) -> Llama:
    with torch.device(device):
        return Llama(**parts).to(torch.bfloat16)


def _sharded(model: Llama, mesh: Any) -> nn.Module:
    """FSDP2 along a mesh of more than one rank."""
    from torch.distributed.fsdp import fully_shard

    if mesh.size() == 1:
        return model
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: nn.Module, device: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(0, WORDS, (BATCH, LENGTH), device=device)
        loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def build_pp(device: Any, schedule_name: str = "Schedule1F1B") -> Any:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    mesh = init_device_mesh("cuda", (PARTS, dist.get_world_size() // PARTS), mesh_dim_names=("pp", "dp"))
    rank = mesh["pp"].get_local_rank()
    model = _sharded(_llama(device, first=rank == 0, last=rank == PARTS - 1), mesh["dp"])
    # Given, as the stages would otherwise ask each other at run time.
    ids = torch.empty(BATCH, LENGTH // 2, dtype=torch.int64, device="meta")
    hidden = torch.empty(BATCH, LENGTH // 2, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    logits = torch.empty(BATCH, LENGTH // 2, WORDS, dtype=torch.bfloat16, device="meta")
    given, returned = (ids, hidden) if rank == 0 else (hidden, logits)
    group = mesh["pp"].get_group()
    stage = PipelineStage(
        model, rank, PARTS, device, input_args=(given,), output_args=(returned,), group=group
    )
    schedule = getattr(pipelining, schedule_name)(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(0, WORDS, (BATCH * MICRO_BATCHES, LENGTH // 2), device=device)
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def build_cp(device: Any) -> Any:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (PARTS,), mesh_dim_names=("cp",))
    with torch.device(device):
        model = Llama().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(0, WORDS, (BATCH, LENGTH * PARTS), device=device)
        with (
            context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def build_fsdp1(device: Any, offload: bool = False) -> Any:
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with torch.device(device):
        model = Llama()
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=half,
        use_orig_params=True,
        cpu_offload=CPUOffload(offload_params=offload),
    )
    return trained(wrapped, device)


def build_selective(device: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> Any:
        kept = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with torch.device(device):
        model = Llama().to(torch.bfloat16)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fully_shard(checkpoint_wrapper(block, context_fn=contexts))
    return trained(fully_shard(model), device)


def build_zero(device: Any, stage: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    with torch.device(device):
        model = Llama()
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step() -> None:
        ids = torch.randint(0, WORDS, (BATCH, LENGTH), device=device)
        engine.backward(loss_of(engine(ids), ids))
        engine.step()

    return model, engine.optimizer.optimizer, step


BUILDS = {
    "tp": build_tp,
    "fsdp-tp": build_tp,
    "pp": build_pp,
    "pp-fsdp": build_pp,
    "gpipe": functools.partial(build_pp, schedule_name="ScheduleGPipe"),
    "cp": build_cp,
    "fsdp1": build_fsdp1,
    "fsdp1-offload": functools.partial(build_fsdp1, offload=True),
    "selective": build_selective,
    **{f"zero{stage}": functools.partial(build_zero, stage=stage) for stage in (1, 2, 3)},
}

RANKS = {"fsdp-tp": 2 * PARTS, "pp-fsdp": 2 * PARTS}
"""Of the kinds with a mesh of two dimensions; the others have as many as parts."""


def ranks_of(kind: str) -> int:
    return RANKS.get(kind, PARTS)


def build(device: Any) -> Any:
    return BUILDS[os.environ["PARALLEL_KIND"]](device)


def measure(folder: Path) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    kind = os.environ["PARALLEL_KIND"]
    _, _, step = build(device)
    steps = peaks.measured(step, STEPS)
    rank = dist.get_rank()
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(steps))
    dist.barrier()
    dist.destroy_process_group()


def predict(rank: int) -> None:
    import memtriage

    prediction = memtriage.predict(
        build,
        steps=STEPS,
        gpu="h100",
        world_size=ranks_of(os.environ["PARALLEL_KIND"]),
        rank=rank,
        torch_version="2.11.0",
    )
    print(json.dumps(peaks.predicted(prediction)))


def compare(folder: Path, kinds: list[str]) -> None:
    """Measure some kinds at a time, predict all meanwhile, and print a line for each rank and step."""
    kinds = [kind for kind in kinds if ranks_of(kind) <= torch.cuda.device_count()]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with ThreadPoolExecutor(AT_A_TIME) as gpus, ThreadPoolExecutor(4 * len(kinds)) as cores:
        real = {
            kind: gpus.submit(_run, kind, *launcher, str(ranks_of(kind)), __file__, "measure", str(folder))
            for kind in kinds
        }
        predicted = {
            (kind, rank): cores.submit(_run, kind, __file__, "predict", str(rank))
            for kind in kinds
            for rank in range(ranks_of(kind))
        }
        for (kind, rank), prediction in predicted.items():
            failed = [text for status, text in (real[kind].result(), prediction.result()) if status]
            if failed:
                print(f"{kind} rank {rank} failed: {failed[0][-3000:]}", flush=True)
                continue
            steps = json.loads((folder / f"{kind}-{rank}.json").read_text())
            promised = json.loads(prediction.result()[1].splitlines()[-1])
            peaks.print_differences(f"{kind} rank {rank}", promised, steps)


def _run(kind: str, *command: str) -> tuple[int, str]:
    environment = {**os.environ, "PARALLEL_KIND": kind, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, check=False
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]))
    elif sys.argv[1] == "predict":
        predict(int(sys.argv[2]))
    else:
        compare(Path(sys.argv[2]), sys.argv[3:] or list(BUILDS))
