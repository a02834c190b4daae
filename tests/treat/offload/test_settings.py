"""Settings of an offloaded optimizer: the limits of each, and which go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memtriage.treat.offload.kernel import hyper_of
from memtriage.treat.offload.overlap import check_not_replicated
from memtriage.treat.offload.settings import OffloadSettings, check_group

USUAL = OffloadSettings(
    state_dtype=torch.float32,
    gradients="device",
    overlap_backward=False,
    max_norm=None,
    reduce_gradients=True,
    tile_elements=1 << 22,
    ring_depth=4,
    pin_memory=True,
    kernel="auto",
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_dtype": torch.int8}, "state_dtype must be one of"),
        ({"gradients": "disk"}, "gradients must be 'device' or 'host', not 'disk'"),
        ({"kernel": "triton"}, "kernel must be one of"),
        ({"max_norm": 0.0}, "max_norm must be positive or None, not 0.0"),
        ({"max_norm": float("nan")}, "max_norm must be positive or None, not nan"),
        ({"tile_elements": 0}, "tile_elements must be a multiple of 64, not 0"),
        ({"tile_elements": 100}, "tile_elements must be a multiple of 64, not 100"),
        ({"ring_depth": 0}, "ring_depth must be at least 1, not 0"),
        ({"overlap_backward": True, "max_norm": 1.0}, "max_norm needs all gradients before the first update"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(USUAL, **changes).check(partitioned=False)


def test_ranks_that_share_the_state_cannot_overlap_backward() -> None:
    USUAL.check(partitioned=True)
    with pytest.raises(ValueError, match="overlap_backward works without process_group"):
        replace(USUAL, overlap_backward=True).check(partitioned=True)


GROUP = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False, "amsgrad": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1e-9}, "lr must not be negative, got -1e-09"),
        ({"lr": float("nan")}, "lr must not be negative, got nan"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"betas": (1.0, 0.9)}, r"beta1 must be in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, r"beta2 must be in \[0, 1\), got -0.1"),
        ({"amsgrad": True}, "amsgrad=True is not supported"),
    ],
)
def test_a_setting_of_a_group_that_cannot_be_used_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_group(GROUP | settings)


def test_settings_are_read_as_numbers() -> None:
    hyper = hyper_of(GROUP | {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.25), 0.75), "maximize": True})
    assert (hyper.lr, hyper.beta1, hyper.beta2, hyper.eps) == (0.5, 0.25, 0.75, 1e-8)
    assert (hyper.weight_decay, hyper.maximize) == (0.01, True)
    assert hyper_of(GROUP).maximize is False


def test_one_of_several_ranks_may_not_overlap_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    check_not_replicated(nn.Parameter(torch.ones(2)))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="plain parameters on several ranks"):
        check_not_replicated(nn.Parameter(torch.ones(2)))
