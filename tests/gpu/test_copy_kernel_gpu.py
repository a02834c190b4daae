"""The copy kernel against torch's own copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memtriage.treat.device.copy_kernel import TILE, compiled
from memtriage.treat.device.cuda import CudaDevice

GUARD = 0xA5


@pytest.mark.parametrize("ranges", [64, 256, 257, 5_000, 70_000])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_range_is_copied_and_nothing_beside_it(ranges: int, *, aligned: bool) -> None:
    assert compiled(0) is not None
    dice = np.random.default_rng(ranges)
    sizes = dice.integers(1, 2_000, ranges)
    edges = [1, 15, 16, TILE - 1, TILE, TILE + 1, 5 * TILE, 9 * TILE + 7]
    sizes[dice.choice(ranges, len(edges), replace=False)] = edges
    steps = sizes + dice.integers(1, 64, ranges)
    if aligned:
        steps = -(-steps // 512) * 512
    offsets = np.cumsum(steps) - steps
    total = int(steps.sum())
    source = torch.randint(0, 255, (total,), dtype=torch.uint8, device="cuda")
    target = torch.full((total,), GUARD, dtype=torch.uint8, device="cuda")
    inside = np.zeros(total + 1, np.int64)
    np.add.at(inside, offsets, 1)
    np.add.at(inside, offsets + sizes, -1)
    expected = torch.where(torch.from_numpy(np.cumsum(inside[:-1]) > 0).cuda(), source, target)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    order = dice.permutation(ranges)
    device = CudaDevice(0)
    with device.entered():
        device.copy(
            target.data_ptr() + offsets[order],
            source.data_ptr() + offsets[order],
            sizes[order],
            stream.cuda_stream,
        )
    torch.cuda.synchronize()
    assert torch.equal(target, expected)
