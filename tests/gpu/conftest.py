"""Tests that need a GPU: skipped where there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator

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


def _give_back() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
