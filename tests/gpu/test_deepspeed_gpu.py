"""The remedy for DeepSpeed on a real GPU: the same bits, 16 bytes per parameter, nothing rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from memtriage.treat.offload.pinned import locked_memory
from support.real_deepspeed import installed, run

WIDTH = 3072
FIXED = 96 << 20
"""Bytes that are not of parameters: two tiles, buffers of small tensors, what libraries grow by meanwhile."""

MIB = 1 << 20
NOISE = 8 * MIB

SHARED = {"two micro-batches": {False}, "shared sums": {True}}
"""Where sums of micro-batches are, and whether they are in the fp32 gradients."""

needs_deepspeed = pytest.mark.skipif(not installed(), reason="needs deepspeed")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_locked_memory_costs_its_size_and_goes_with_its_last_view() -> None:
    torch.zeros(1, device="cuda")
    on_device = torch.zeros(520 * MIB, dtype=torch.uint8, device="cuda")
    small = locked_memory(MIB)
    assert small is not None
    on_device[:MIB].copy_(small)
    before = resident()
    memory = locked_memory(520 * MIB)
    assert memory is not None and memory.is_pinned()
    assert abs(resident() - before - 520 * MIB) <= NOISE
    memory.fill_(7)
    view = memory[4096:].view(torch.bfloat16)
    on_device.copy_(memory, non_blocking=True)
    del memory
    assert view.is_pinned()
    del view  # while the copy may be under way
    assert resident() - before <= NOISE
    assert bool((on_device == 7).all())


@needs_deepspeed
def test_the_bits_are_those_of_deepspeed_alone() -> None:
    for way, result in run("cuda", "bits").items():
        assert result["with"] == result["without"], way
        assert result["longer with"] == result["longer without"], way
        assert result["loaded and undone"] == result["longer without"], way
        assert result["during"] == ["Streamed", "Streamed"], way
        assert result["after"] == ["Tensor", "Tensor"], way
        assert set(result["shared"]) == SHARED.get(way, set()), way
        assert not any(result["shared after"]), way
        assert result["pinned"] == (way != "pageable"), way
        assert (result["rounding"] > 0) == (way != "pageable"), way


@needs_deepspeed
def test_it_takes_sixteen_bytes_a_parameter(keep: Callable[[str, Any], None]) -> None:
    without, with_remedy = (
        run("cuda", "bytes", str(WIDTH), "none"),
        run("cuda", "bytes", str(WIDTH), "remedy"),
    )
    keep("deepspeed_remedy", {"without": without, "with": with_remedy})
    parameters = with_remedy["parameters"]
    assert with_remedy["stepped"] <= 16.3 * parameters + FIXED
    # 75.5 M parameters: 4 bytes each become 512 MiB for 302 MB, 2 bytes 256 MiB for 151 MB.
    assert without["stepped"] - with_remedy["stepped"] >= 7 * parameters
