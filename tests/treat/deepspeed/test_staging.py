"""The stand-in for DeepSpeed's staging copy, and the tiles behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.treat.deepspeed.internals import GRADIENT_BUFFER, STAGING
from memtriage.treat.deepspeed.staging import Streamed, Tiles, restore, slim


def weights(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


@settings(max_examples=50)
@given(
    count=st.integers(0, 700),
    tile=st.sampled_from([2, 64, 128, 4096]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_tiles_round_as_one_copy_does(count: int, tile: int, dtype: torch.dtype) -> None:
    source, target = weights(count), torch.full((count,), -7.0, dtype=dtype)
    tiles = Tiles(tile_bytes=tile)
    tiles.stream(source, target)
    tiles.stream(source, target)  # the tiles that were used once are used again
    assert torch.equal(target, source.to(dtype))


def test_a_stand_in_is_written_and_read_as_deepspeed_does_it() -> None:
    stand_in = Streamed(torch.zeros(100, dtype=torch.bfloat16), Tiles())
    masters, on_device = weights(100), torch.zeros(100, dtype=torch.bfloat16)
    stand_in.data.copy_(masters.data)
    on_device.data.copy_(stand_in.data, non_blocking=True)
    assert torch.equal(on_device, masters.bfloat16())
    assert stand_in.nbytes == 200


def test_a_stand_in_keeps_nothing_alive_and_refuses_stale_data() -> None:
    stand_in = Streamed(torch.zeros(4, dtype=torch.bfloat16), Tiles())
    target = torch.zeros(4, dtype=torch.bfloat16)
    stand_in.copy_(weights(4))
    target.copy_(stand_in)
    with pytest.raises(RuntimeError, match="before it has written"):
        target.copy_(stand_in)


def test_unknown_uses_of_a_stand_in_are_refused() -> None:
    stand_in: Any = Streamed(torch.zeros(4, dtype=torch.bfloat16), Tiles())
    with pytest.raises(TypeError, match="unknown way"):
        torch.add(torch.zeros(4), stand_in)
    with pytest.raises(ValueError, match=r"\(5,\) was given, expected \(4,\)"):
        stand_in.copy_(weights(5))
    with pytest.raises(AttributeError):
        stand_in.to("cpu")


def an_optimizer(*, pinned: bool = False) -> Any:
    return SimpleNamespace(
        **{
            STAGING: [torch.zeros(10, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)],
            GRADIENT_BUFFER: torch.zeros(8, dtype=torch.bfloat16),
            "cpu_offload_pin_memory": pinned,
        }
    )


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_taken_away_can_be_made_anew(pinned: bool) -> None:
    optimizer = an_optimizer(pinned=pinned)
    copies = getattr(optimizer, STAGING)
    assert slim(optimizer, Tiles(), drop_buffer=True) == (32, 8)
    assert all(isinstance(copy, Streamed) for copy in copies)
    assert getattr(optimizer, GRADIENT_BUFFER).numel() == 0
    accelerator: Any = Mock(pin_memory=Mock(side_effect=lambda tensor: tensor))
    restore(optimizer, accelerator, 8)
    assert getattr(optimizer, STAGING) is copies
    assert [(copy.shape, copy.dtype) for copy in copies] == [((10,), torch.bfloat16), ((6,), torch.bfloat16)]
    assert getattr(optimizer, GRADIENT_BUFFER).shape == (8,)
    assert accelerator.pin_memory.call_count == (3 if pinned else 0)


def test_a_buffer_that_is_used_stays() -> None:
    optimizer = an_optimizer()
    assert slim(optimizer, Tiles(), drop_buffer=False) == (32, 0)
    assert getattr(optimizer, GRADIENT_BUFFER).numel() == 8
