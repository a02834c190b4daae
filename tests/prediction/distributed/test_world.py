"""One rank of many: bytes of shards, buckets and buffers against arithmetic, and nothing left behind."""

import os
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

import memtriage
from memtriage.model import units
from memtriage.prediction.build import BuildError
from memtriage.prediction.distributed import nccl
from memtriage.prediction.distributed.buffers import COMMUNICATION, UNSHARDED
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import DEFAULT_STREAM
from memtriage.prediction.trace import trace
from support.training import training

WIDTH = 512
LAYERS = 4
RANKS = 4
LAYER = WIDTH * WIDTH * 4
"""Bytes of one layer's weight in single precision: 1 MiB."""
VERSION = (2, 13)


def layers(device):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(device)


def sharded(device, **options):
    model = layers(device)
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def once(model, batch):
    model(batch()).pow(2).sum().backward()


def program(wrap, optimizer=torch.optim.SGD, rows=64, backward=once):
    """A build function of the layers, wrapped for many ranks."""

    def build(device):
        model = wrap(device)
        made = optimizer(model.parameters(), lr=0.1)

        def step():
            backward(model, lambda: torch.randn(rows, WIDTH, device=device))
            made.step()
            made.zero_grad()

        return model, made, step

    return build


def replicated(device, **options):
    return nn.parallel.DistributedDataParallel(layers(device), **options)


def traced(build, rank=0, steps=2, ranks=RANKS):
    return trace(build, machine("h200"), VERSION, steps, ranks, rank)


def sizes(found, owner):
    """Bytes of the blocks of an owner, as often as they occur."""
    return Counter(
        block.size
        for number, block in enumerate(found.recording.blocks)
        if block.size and owner in (block.owner, found.owners.get(number))
    )


def test_fsdp2_keeps_one_share_of_everything_that_lasts():
    prediction = memtriage.predict(program(sharded, torch.optim.AdamW), world_size=RANKS)
    alone = memtriage.predict(program(layers, torch.optim.AdamW))
    assert prediction.by_owner["parameter"] * RANKS == alone.by_owner["parameter"] == LAYERS * LAYER
    states = prediction.by_owner["optimizer state"], alone.by_owner["optimizer state"]
    assert states[0] * RANKS == states[1] == 2 * LAYERS * LAYER


HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Forward and backward gather each layer, and the gradients of each are laid out for the reduction.
        ({}, {LAYER: 3 * LAYERS}),
        ({"reshard_after_forward": False}, {LAYER: 2 * LAYERS}),
        # Gathered and reduced, and the shards that are cast before they are gathered.
        (
            {"mp_policy": HALVES},
            {LAYER // 2: 2 * LAYERS, LAYER: LAYERS, LAYER // 2 // RANKS: 2 * LAYERS},
        ),
    ],
    ids=["plain", "gathered once", "in half precision"],
)
def test_fsdp2_gathers_whole_layers_and_reduces_into_shares(options, expected):
    prediction = traced(program(lambda device: sharded(device, **options)), steps=1)
    buffers = sizes(prediction, COMMUNICATION)
    assert {size: buffers[size] for size in expected} == expected
    # What the reduction makes is the gradient's shard.
    assert sizes(prediction, "gradient") == {LAYER // RANKS: LAYERS}


def test_fsdp2_gathers_and_reduces_on_streams_of_their_own():
    prediction = traced(program(sharded))
    streams = {block.stream for block in prediction.recording.blocks if block.owner == COMMUNICATION}
    gathering, reducing = streams - {DEFAULT_STREAM}
    shards = {block.stream for block in prediction.recording.blocks if block.size == LAYER // RANKS}
    assert reducing in shards and gathering not in shards
    assert all(
        block.stream == DEFAULT_STREAM for block in prediction.recording.blocks if block.op == "aten::mm"
    )


def test_a_norm_by_sequence_keeps_its_own_rows_and_a_gathered_result_is_one_block():
    rows = 256

    def build(device):
        mesh = init_device_mesh("cuda", (RANKS,))
        model = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)).to(device)
        split = ColwiseParallel(input_layouts=Shard(0))
        parallelize_module(model, mesh, {"0": SequenceParallel(sequence_dim=0), "1": split})
        return training(model, lambda: model(torch.randn(rows // RANKS, WIDTH, device=device)).sum())

    blocks = traced(build, steps=1).recording.blocks
    statistics = [block.size for block in blocks if block.op == "aten::_fused_rms_norm"]
    assert statistics == [rows // RANKS * WIDTH * 4, rows // RANKS * 4]  # normed; one number for each row
    gathered = [block.op for block in blocks if block.size == rows * WIDTH * 4 and block.phase == "forward"]
    assert gathered == ["_c10d_functional::all_gather_into_tensor"]


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 40), ranks=st.integers(2, 9), data=st.data())
def test_every_rank_keeps_the_largest_share_of_rows(rows, ranks, data):
    rank = data.draw(st.integers(0, ranks - 1))

    def wrap(device):
        return fully_shard(nn.Linear(WIDTH, rows, bias=False).to(device))

    prediction = traced(program(wrap), rank=rank, steps=1, ranks=ranks)
    share = -(-rows // ranks)  # `torch.chunk`; smaller shares are padded to it
    assert sizes(prediction, "parameter") == {share * WIDTH * 4: 1}


def test_hybrid_mesh_shards_one_dimension_with_two_communicators():
    def wrap(device):
        mesh = dist.device_mesh.init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        return sharded(device, mesh=mesh)

    for _ in range(2):  # the second time, what DTensor remembers of the first must not matter
        prediction = traced(program(wrap), steps=1)
        assert prediction.communicators == [2, 2]
        assert sizes(prediction, "parameter") == {LAYER // 2: LAYERS}


def flat(device, **options):
    """The layers under the first FSDP."""
    one_by_one = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(layers(device), auto_wrap_policy=one_by_one, **options)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda device: sharded(device, offload_policy=CPUOffloadPolicy()),
        lambda device: flat(device, device_id=device, cpu_offload=CPUOffload(offload_params=True)),
    ],
    ids=["shards", "flat parameters"],
)
def test_what_is_offloaded_takes_no_memory_of_the_device(wrap):
    prediction = memtriage.predict(program(wrap), world_size=RANKS)
    assert "parameter" not in prediction.by_owner
    assert prediction.by_owner[UNSHARDED] >= LAYER


def test_the_first_fsdp_has_flat_parameters_that_are_gathered():
    prediction = memtriage.predict(program(flat), world_size=RANKS)
    assert prediction.by_owner["parameter"] == LAYERS * LAYER // RANKS
    assert prediction.by_owner[UNSHARDED] >= LAYER
    half = MixedPrecision(param_dtype=torch.bfloat16)
    found = traced(program(lambda device: flat(device, mixed_precision=half)), steps=1)
    assert set(sizes(found, UNSHARDED)) == {LAYER // 2}
    assert LAYER // 2 // RANKS in sizes(found, COMMUNICATION)


def test_shards_from_the_meta_device_are_initialized_alone():
    def wrap(device):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        for layer in model:
            fully_shard(layer)
        model.to_empty(device=device)
        for layer in model:
            layer.reset_parameters()
        return fully_shard(model)

    prediction = traced(program(wrap), steps=1)
    built = [block.size for block in prediction.recording.blocks if block.phase == "build" and block.size]
    assert sizes(prediction, "parameter") == {LAYER // RANKS: LAYERS}
    assert max(built) == LAYER // RANKS


def test_gradient_clipping_and_accumulation_under_fsdp2():
    def clipped(model, batch):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            once(model, batch)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.device.type == "cuda"

    def twice(model, batch):
        once(model, batch)
        once(model, batch)

    kept, reduced = (
        memtriage.predict(program(sharded, torch.optim.AdamW, backward=backward), world_size=RANKS)
        for backward in (clipped, twice)
    )
    # Without a reduction the first micro-batch leaves whole gradients.
    assert kept.peak_allocated >= reduced.peak_allocated + LAYERS * LAYER // 2


@pytest.mark.parametrize(
    ("options", "rebuilt"),
    [
        ({}, {LAYER: 1, (LAYERS - 1) * LAYER: 1}),  # the first of 1 MiB, the others of 25
        ({"bucket_cap_mb": 2}, {2 * LAYER: LAYERS // 2}),
        ({"bucket_cap_mb": 100}, {LAYERS * LAYER: 1}),
    ],
)
def test_ddp_has_smaller_buckets_after_the_first_step(options, rebuilt):
    prediction = traced(program(lambda device: replicated(device, **options)), steps=3)
    buckets = Counter(
        {size: count for size, count in sizes(prediction, COMMUNICATION).items() if size >= LAYER}
    )
    assert buckets == Counter({LAYERS * LAYER: 1}) + Counter(rebuilt)
    assert prediction.communicators == [RANKS]


def test_ddp_has_two_buckets_in_its_second_step():
    # Large activations: the peak is at the start of backward.
    prediction = memtriage.predict(program(replicated, rows=1 << 14), steps=3, world_size=RANKS)
    _, second, third = prediction.steps
    assert second.peak_allocated - third.peak_allocated == LAYERS * LAYER
    assert second.end_allocated == third.end_allocated
    assert prediction.by_owner[COMMUNICATION] == LAYERS * LAYER
    assert any(
        f"bucket of the first step ({units.size(LAYERS * LAYER)})" in note for note in prediction.notes
    )


def test_a_bucket_that_stays_is_not_said_to_be_replaced():
    prediction = memtriage.predict(
        program(lambda device: replicated(device, find_unused_parameters=True)), steps=3, world_size=RANKS
    )
    assert not any("bucket of the first step" in note for note in prediction.notes)


def test_a_rank_that_a_launcher_starts_alone_has_its_group_and_no_first_bucket(monkeypatch):
    seen = []

    def wrap(device):
        dist.init_process_group("nccl")
        seen.append((dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]))
        return replicated(device)

    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = memtriage.predict(program(wrap, rows=1 << 14), steps=3)
    assert seen == [(0, 1, "0")]
    assert os.environ["WORLD_SIZE"] == "1"
    _, second, third = alone.steps
    assert second.peak_allocated == third.peak_allocated
    # Its buckets are there all the same.
    assert alone.by_owner[COMMUNICATION] == LAYERS * LAYER
    assert alone.outside_allocator == machine("h200").outside + nccl.outside([1])
    assert not any("bucket of the first step" in note for note in alone.notes)


def test_gradients_as_bucket_views_save_a_copy_of_the_model():
    apart = memtriage.predict(program(replicated), steps=3, world_size=RANKS)
    views = memtriage.predict(
        program(lambda device: replicated(device, gradient_as_bucket_view=True)), steps=3, world_size=RANKS
    )
    saved = apart.peak_allocated - views.peak_allocated
    # A gradient is apart until it is copied; so is the next one.
    assert (LAYERS - 2) * LAYER <= saved <= LAYERS * LAYER


def test_ddp_broadcasts_the_model_when_it_is_wrapped():
    prediction = traced(program(replicated), steps=1)
    flat = [
        block for block in prediction.recording.blocks if block.op == "aten::cat" and block.phase == "build"
    ]
    assert [block.size for block in flat] == [LAYERS * LAYER]


def test_no_sync_leaves_gradients_of_the_first_micro_batch_alone():
    def twice(model, batch):
        with model.no_sync():
            once(model, batch)
        once(model, batch)

    predicted = memtriage.predict(program(replicated, backward=twice), world_size=RANKS)
    assert predicted.by_owner["gradient"] >= LAYERS * LAYER


def test_a_compressing_hook_makes_buffers_of_half_the_size():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def wrap(device):
        model = replicated(device)
        model.register_comm_hook(None, bf16_compress_hook)
        return model

    prediction = traced(program(wrap))
    halves = [block for block in prediction.recording.blocks if block.size == LAYERS * LAYER // 2]
    assert halves and all(block.phase == "backward" for block in halves)


def test_the_states_of_zero_1_are_shared_out_among_the_ranks():
    def wrapped(parameters, lr):
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)

    shares = [
        memtriage.predict(program(replicated, wrapped), world_size=3, rank=rank).by_owner["optimizer state"]
        for rank in range(3)
    ]
    # Four layers on three ranks: one has two of them; two moments of each.
    assert sorted(shares) == [2 * LAYER, 2 * LAYER, 4 * LAYER]


def test_program_that_makes_its_own_group_gets_the_asked_rank():
    seen = []

    def wrap(device):
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        group = dist.new_group([0, 1], backend="gloo")
        seen.append((dist.get_rank(), dist.get_world_size(), os.environ["RANK"], group is not None))
        return replicated(device, device_ids=[0])

    memtriage.predict(program(wrap), world_size=RANKS, rank=2)
    assert seen == [(2, RANKS, "2", True)]


def test_unexpected_number_of_ranks_is_refused():
    def wrap(device):
        dist.init_process_group("nccl", world_size=8, rank=0)
        return replicated(device)

    with pytest.raises(BuildError, match="process group of 8 ranks; expected 4"):
        memtriage.predict(program(wrap), world_size=RANKS)


@pytest.mark.parametrize("wrap", [replicated, sharded])
def test_a_program_for_many_ranks_wants_their_number(wrap):
    with pytest.raises(BuildError, match="world_size"):
        memtriage.predict(program(wrap))


def test_everything_is_put_back():
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def state():
        return (
            dist.is_initialized(),
            dict(os.environ),
            sys.excepthook,
            dist.init_process_group,
            torch.cuda.Stream,
            torch.UntypedStorage.resize_,
            torch.Tensor.record_stream,
            torch._C._get_accelerator,
            _fsdp_collectives.foreach_all_gather,
            nn.parallel.distributed._verify_param_shape_across_processes,
        )

    before = state()
    memtriage.predict(program(sharded), steps=1, world_size=2, rank=1)
    with pytest.raises(BuildError):
        memtriage.predict(program(lambda device: 1 / 0), world_size=2)
    assert state() == before


def test_a_group_that_is_there_already_is_not_touched(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        memtriage.predict(program(layers))
        with pytest.raises(ValueError, match="exists already"):
            memtriage.predict(program(layers), world_size=2)
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


def test_context_parallel_runs_attention_on_shares_of_the_sequence():
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length, heads = 256, 4

    def build(device):
        mesh = init_device_mesh("cuda", (2,))
        model = nn.Linear(WIDTH, 3 * WIDTH, bias=False).to(device, torch.bfloat16)

        def step():
            batch = torch.randn(1, length, WIDTH, device=device, dtype=torch.bfloat16)
            with (
                context_parallel(mesh, buffers=[batch], buffer_seq_dims=[1]),
                sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            ):
                parts = (
                    part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in model(batch).chunk(3, dim=-1)
                )
                nn.functional.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

        return model, torch.optim.SGD(model.parameters()), step

    blocks = traced(build, ranks=2).recording.blocks
    attended = {block.size for block in blocks if block.op == "aten::_scaled_dot_product_flash_attention"}
    assert length // 2 * WIDTH * 2 in attended
    assert length * WIDTH * 2 not in attended
