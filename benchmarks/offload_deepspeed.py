"""DeepSpeed's side of `offload.py`: ZeRO-2 with `offload_optimizer`, and the same with memtriage's remedy."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Final

PAGEABLE: Final = "deepspeed pageable"
REMEDIED: Final = "deepspeed exact"
VARIANTS: Final = ("deepspeed", PAGEABLE, REMEDIED)


def installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


@functools.cache
def _remedy() -> Any:
    """Once in a process, for all its engines."""
    import memtriage

    return memtriage.deepspeed_exact_host_memory()


def make_engine(model: Any, rows: int, variant: str) -> Any:
    """An engine with DeepSpeedCPUAdam; `variant` is one of `VARIANTS`."""
    import deepspeed

    if variant == REMEDIED:
        _remedy()
    settings = {
        "train_micro_batch_size_per_gpu": rows,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": variant != PAGEABLE},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return engine
