"""The symptom as a user has it: ZeRO-2 with the optimizer on the host, and nothing of memtriage in it.

memtriage run cases/deepspeed_zero2_offload/train.py [--layers N] [--width N]
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    deepspeed.init_distributed()
    device = get_accelerator().current_device_name()
    model = torch.nn.Sequential(
        *(
            torch.nn.Linear(options.width, options.width, bias=False, device=device, dtype=torch.bfloat16)
            for _ in range(options.layers)
        )
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    for step in range(options.steps):
        rows = torch.randn(4, options.width, device=device, dtype=torch.bfloat16)
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()
        print(f"step {step}: {loss.item():.6f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
