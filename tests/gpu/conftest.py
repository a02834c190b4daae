"""Tests that need a GPU: skipped where there is none."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Skip without CUDA; else begin and end with what earlier tests left behind given back."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.init()
    _give_back()
    yield
    _give_back()


@pytest.fixture(scope="session")
def keep() -> Callable[[str, Any], None]:
    """Prints what was measured, and writes it to `NAME.json` in the folder of MEMTRIAGE_GPU_OUT, if any."""
    folder = os.environ.get("MEMTRIAGE_GPU_OUT")

    def keep_as(name: str, measured: Any) -> None:
        text = json.dumps(measured, indent=1)
        print(f"{name}: {text}", flush=True)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.json").write_text(text + "\n")

    return keep_as


def _give_back() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
