"""Buffers of FSDP and DDP have an owner while they are allocated."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from memtriage.prediction.distributed.buffers import replacements
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.trace import trace
from support.training import training

WIDTH = 256
LAYER = WIDTH * WIDTH * 4


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (
            lambda model, device: fully_shard(model),
            {("communication buffer", 2): 4, ("unsharded parameter", 2): 2, ("communication buffer", 1): 2},
        ),
        (
            lambda model, device: FullyShardedDataParallel(model, device_id=device),
            {("unsharded parameter", 2): 2, ("communication buffer", 1): 2},
        ),
        (
            lambda model, device: DistributedDataParallel(model, device_ids=[device]),
            {("communication buffer", 2): 2, ("communication buffer", 0): 2},
        ),
    ],
    ids=["fsdp2", "fsdp1", "ddp"],
)
def test_buffers_are_named_by_what_allocates_them(wrap, expected):
    def build(device):
        made = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
        model = wrap(made, device) or made
        return training(model, lambda: model(torch.empty(2, WIDTH, device=device)).sum())

    found = trace(build, machine("h200"), (2, 13), 2, world_size=2)
    counts = Counter(
        (block.owner, block.size // (LAYER // 2))
        for block in found.recording.blocks
        if block.owner not in (None, "workspace")
    )
    assert counts == expected


def test_the_owner_is_what_it_was_before_afterwards():
    lifetimes = Lifetimes(lambda: True)
    lifetimes.owner = "before"
    for _, _, call in replacements(lifetimes):
        with pytest.raises(TypeError):
            call()
        assert lifetimes.owner == "before"
