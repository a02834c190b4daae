"""From a traced program to what a search for blocks looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from memtriage.allocator.priming_search import BRIEF, POOLS
from memtriage.model.recording import Recording
from memtriage.planning.priming import other_settings, priming_of_recording, priming_of_trace
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.requests import requests_of
from memtriage.prediction.simulate import replay
from memtriage.prediction.trace import Trace, trace
from memtriage.prediction.watch import OPTIMIZER_STATE
from memtriage.snapshots.read import load_snapshot
from support.recordings import recording
from support.recordings import training as recorded_training
from support.training import training

KIND = machine("h200")
MIB = 1 << 20


def traced(layer: Callable[[], nn.Module], *shape: int, conf: str = "") -> Trace:
    def build(device: Any) -> Any:
        model = layer().to(device)
        return training(model, lambda: model(torch.randn(*shape, device=device)).sum())

    return trace(build, KIND, (2, 11), 2, allocator_conf=conf)


def linear() -> nn.Module:
    return nn.Linear(1024, 1024)


@pytest.mark.parametrize(
    ("layer", "shape", "convolves"),
    [(linear, (512, 1024), False), (lambda: nn.Conv2d(16, 16, 3), (8, 16, 128, 128), True)],
)
def test_convolutions_are_known(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], convolves: bool
) -> None:
    requests = requests_of(traced(layer, *shape), KIND.memory)
    assert len(requests.steps) == 2 and any(size for _, size in requests.all())
    assert requests.convolves == convolves


def test_settings_of_the_program_are_not_tried_otherwise() -> None:
    found = traced(linear, 512, 1024, conf="max_split_size_mb:1024")
    tried = other_settings(found, KIND, requests_of(found, KIND.memory), allowed=KIND.memory)
    assert list(tried) == ["large_segment_size_mb:512"]
    settings = tried["large_segment_size_mb:512"]
    assert (settings.large_segment_size, settings.max_split_size) == (512 << 20, 1024 << 20)


def traced_adam(**options: Any) -> Trace:
    """A layer of 4 MiB and a bias, trained by AdamW in two groups."""

    def build(device: Any) -> Any:
        model = nn.Linear(1024, 1024).to(device)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer = torch.optim.AdamW(groups, **options)
        return training(model, lambda: model(torch.randn(512, 1024, device=device)).sum(), optimizer)

    return trace(build, KIND, (2, 11), 3, allocator_conf="")


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_states_are_told_from_what_else_the_step_of_an_optimizer_makes(options: dict[str, Any]) -> None:
    found = traced_adam(**options)
    assert found.optimizers == [4 * (1024 * 1024 + 1024)]
    blocks = found.recording.blocks
    states = [number for number, block in enumerate(blocks) if block.state_of == 0]
    assert [blocks[number].size for number in states if blocks[number].size > 4096] == [4 * MIB] * 2
    freed = {event.block for event in found.recording.events if not event.size}
    assert freed.isdisjoint(states)
    assert all(found.owners.get(number) == OPTIMIZER_STATE for number in states)


def test_in_a_pool_states_are_not_among_the_requests() -> None:
    found = traced_adam()
    whole, rest = requests_of(found, KIND.memory), requests_of(found, KIND.memory, {0: 8 * MIB})
    states = [size for _, size in whole.steps[0].requests if size]
    for _, size in rest.steps[0].requests:
        if size:
            states.remove(size)
    assert states == [4 * MIB] * 2
    assert rest.steps[1:] and [len(step.requests) for step in rest.steps[1:]] == [
        len(step.requests) for step in whole.steps[1:]
    ]
    (plain, *_), (pooled, *_) = (
        replay(found.recording, found.settings, KIND.memory, 3, pools=pools) for pools in ({}, {0: 20 * MIB})
    )
    assert pooled.end_allocated == plain.end_allocated
    assert 0 <= pooled.peak_reserved - plain.peak_reserved <= 22 * MIB  # with 2 MiB for what is small


def test_an_optimizer_whose_states_need_no_segment_of_their_own_gets_no_pool() -> None:
    priming = priming_of_trace(traced_adam(), KIND, replace(BRIEF, requests=10_000, pool_requests=(10_000,)))
    assert priming.pools == []
    assert POOLS not in [each.name for each in priming.tried]


@pytest.fixture(scope="module")
def fragmented() -> Recording:
    (file,) = (Path(__file__).parents[1] / "data" / "snapshots").glob("fragmentation*.pickle.gz")
    return load_snapshot(file)


def test_a_recording_that_fragments_gets_blocks(fragmented: Recording) -> None:
    priming = priming_of_recording(fragmented)
    assert (priming.helps, priming.reason, bool(priming.blocks), priming.steps) == (True, None, True, 0)
    assert priming.allocated <= priming.reserved_after < 0.9 * priming.reserved_before
    assert priming.reserved_before == fragmented.devices[0].timeline.reserved.max()
    own, *others = priming.checks
    assert own.name == "as recorded" and own.after < 0.9 * own.before
    assert others and all(check.after <= 1.005 * check.before for check in others)


def test_expandable_segments_get_no_blocks(fragmented: Recording) -> None:
    conf = "expandable_segments:True"
    priming = priming_of_recording(replace(fragmented, settings={"PYTORCH_CUDA_ALLOC_CONF": conf}))
    assert priming.reason == "expandable segments are on, which have no fixed sizes"
    assert (priming.blocks, priming.checks, priming.allocator_conf) == ([], [], conf)
    assert priming.reserved_after == priming.reserved_before > 0


def test_the_device_that_reserved_most_counts_and_may_need_none() -> None:
    small, stacks = recorded_training(2)
    large, _ = recorded_training(leak=3 << 20, device="cuda:1")
    both = priming_of_recording(recording(small, large, stacks=stacks))
    assert (both.blocks, both.reason) == ([], "nothing that was tried lowers what is reserved by 0.5 %")
    assert both.reserved_before == both.reserved_after >= both.allocated
    alone = priming_of_recording(recording(large, stacks=stacks))
    assert both == msgspec.structs.replace(alone, seconds=both.seconds)
    assert both.allocated > priming_of_recording(recording(small, stacks=stacks)).allocated


def test_a_recording_without_events_cannot_be_primed_for() -> None:
    with pytest.raises(ValueError, match="record them with"):
        priming_of_recording(recording(stacks=[]))
