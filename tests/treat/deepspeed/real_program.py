"""What tests run in a process of their own: real DeepSpeed, with the remedy and without, on the CPU or a GPU.

    real_program.py bits           trains small models in several ways; digests of the weights as JSON
    real_program.py bytes WIDTH    one model of eight layers; growth of the resident set as JSON

The optimizer is torch's, on the CPU: DeepSpeed's own takes minutes to compile and is the same to the remedy.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import psutil
import torch

import memtriage

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS = 3
ROWS = 4
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": 1e-3},
    "two micro-batches": {"gradient_accumulation_steps": 2},
    "shared sums": {"gradient_accumulation_steps": 3, "gradient_clipping": 1e-3},
}
if ON_GPU:  # elsewhere nothing is pinned anyway
    WAYS["pageable"] = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}


def start() -> None:
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29631"),
    }
    os.environ.setdefault("DS_ACCELERATOR", DEVICE)
    import deepspeed

    # Compiling it takes minutes, and nothing here needs it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if ON_GPU else "gloo", verbose=False)


def make_engine(width: int, layers: int, settings: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, dtype=torch.bfloat16, device=DEVICE) for _ in range(layers))
    )
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() == 2]},
        {
            "params": [parameter for parameter in model.parameters() if parameter.dim() == 1],
            "weight_decay": 0.0,
        },
    ]
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **settings,
    }
    zero = {
        "stage": 2,
        "reduce_bucket_size": 1_000_000,
        "allgather_bucket_size": 1_000_000,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    config["zero_optimization"] = zero | settings.get("zero_optimization", {})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return model, engine


def train(engine: Any, width: int, seed: int) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        rows = torch.randn(ROWS, width, generator=generator, device=DEVICE).bfloat16()
        engine.backward(engine(rows).float().square().mean())
        engine.step()


def digest(model: torch.nn.Module) -> str:
    sums = hashlib.sha256()
    for parameter in model.parameters():
        sums.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def resident() -> int:
    if ON_GPU:
        torch.cuda.synchronize()
    gc.collect()
    memtriage.malloc_trim()
    return int(psutil.Process().memory_info().rss)


def staging(engine: Any) -> list[str]:
    return [type(group).__name__ for group in engine.optimizer.param_buffer_of_bit16_for_cpu_offload_groups]


def shared(engine: Any) -> list[bool]:
    """For each sum of micro-batches, whether it is in its group's fp32 gradients."""
    zero = engine.optimizer
    gradients = [group.grad.untyped_storage().data_ptr() for group in zero.single_partition_of_fp32_groups]
    return [
        gradient.untyped_storage().data_ptr() in gradients
        for gradient in zero.accumulated_grads_in_cpu.values()
    ]


def one_way(settings: dict[str, Any], *, share: bool, width: int = 384) -> dict[str, Any]:
    model, engine = make_engine(width, 4, settings)
    train(engine, width, seed=1)
    expected = digest(model)
    train(engine, width, seed=2)
    longer = digest(model)
    engine.destroy()

    remedy = memtriage.deepspeed_exact_host_memory(share_gradient_sums=share)
    model, engine = make_engine(width, 4, settings)
    during = staging(engine)
    train(engine, width, seed=1)
    found = {"without": expected, "with": digest(model), "during": during, "rounding": remedy.rounding}
    found["shared"] = shared(engine)
    found["pinned"] = engine.optimizer.single_partition_of_fp32_groups[0].is_pinned()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, "one")
        train(engine, width, seed=2)
        found |= {"longer without": longer, "longer with": digest(model)}
        engine.load_checkpoint(folder, "one")
        remedy.undo()
        train(engine, width, seed=2)
        found |= {"loaded and undone": digest(model), "after": staging(engine)}
        found["shared after"] = shared(engine)
        engine.destroy()
    return found


def growth(width: int, remedy: bool) -> dict[str, int]:
    """Bytes over a process in which a small engine has trained already."""
    with memtriage.deepspeed_exact_host_memory() if remedy else nullcontext():
        _, engine = make_engine(64, 1, {})
        train(engine, 64, seed=1)
        engine.destroy()
        model = torch.nn.Linear(width, width, dtype=torch.bfloat16, device=DEVICE)
        model(torch.ones(ROWS, width, dtype=torch.bfloat16, device=DEVICE)).sum().backward()
        del engine, model
        before = resident()
        _, engine = make_engine(width, 8, {})
        made = resident()
        train(engine, width, seed=1)
        parameters = sum(parameter.numel() for parameter in engine.parameters())
        return {"parameters": parameters, "made": made - before, "stepped": resident() - before}


def main() -> None:
    torch.set_num_threads(8 if ON_GPU else 1)
    start()
    if sys.argv[1] == "bits":
        result: dict[str, Any] = {
            name: one_way(settings, share=name == "shared sums") for name, settings in WAYS.items()
        }
    else:
        result = growth(int(sys.argv[2]), remedy=sys.argv[3] == "remedy")
    print("RESULT" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
