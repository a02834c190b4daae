"""torchao's and Megatron-LM's structures are told by shape, at their paths, and emptied if they may."""

from __future__ import annotations

import types
from collections import deque
from functools import lru_cache, wraps
from typing import Any

import pytest
import torch

from memtriage.catalogue.frameworks import DISPATCHER_ATTRIBUTES
from support.holder_looks import clear_places, look, paths
from support.holder_standins import NBYTES, QuantizedTensor, Stage, tensor

pytestmark = pytest.mark.usefixtures("only_new_objects")

MOE = "torchao.prototype.moe_training.MXFP8OnDeviceAllToAllV"


def test_a_precomputed_scale_is_on_the_local_tensor_or_on_the_parameter(stage: Stage) -> None:
    model = stage.keep(torch.nn.Module())

    def parameter(**own: Any) -> Any:
        made = QuantizedTensor(torch.zeros(1))
        made.__dict__.update(own)
        return made

    local = types.SimpleNamespace(_precomputed_scale=tensor())
    model._parameters.update(
        none=None,
        plain=torch.nn.Parameter(tensor()),
        sharded=parameter(_local_tensor=local),
        whole=parameter(_precomputed_scale=tensor()),
        both=parameter(
            _local_tensor=types.SimpleNamespace(_precomputed_scale=tensor()), _precomputed_scale=tensor()
        ),
        unset=parameter(
            _local_tensor=types.SimpleNamespace(_precomputed_scale=None), _precomputed_scale=None
        ),
    )
    assert sorted(look("torchao.precomputed_scale").places) == [
        ("Module.both", NBYTES),
        ("Module.sharded", NBYTES),
        ("Module.whole", NBYTES),
    ]


def test_exchange_buffers_are_the_tensors_among_a_class_s_attributes(stage: Stage) -> None:
    class MXFP8OnDeviceAllToAllV:
        input_sym_mem_buf = tensor()
        grad_input_buf = tensor()
        max_output_rows_per_rank = 7

    module = "torchao.prototype.moe_training"
    stage.module(module, MXFP8OnDeviceAllToAllV=MXFP8OnDeviceAllToAllV)
    stage.module(f"{module}.older", MXFP8OnDeviceAllToAllV=lambda: None)
    assert paths("torchao.all_to_all_buffers") == [f"{MOE}.input_sym_mem_buf", f"{MOE}.grad_input_buf"]
    assert clear_places("torchao.all_to_all_buffers") == 2
    assert (MXFP8OnDeviceAllToAllV.input_sym_mem_buf, MXFP8OnDeviceAllToAllV.grad_input_buf) == (None, None)
    assert MXFP8OnDeviceAllToAllV.max_output_rows_per_rank == 7


def test_routing_tensors_hang_on_a_plain_object_of_a_module(stage: Stage) -> None:
    moe, other = (stage.keep(torch.nn.Module()) for _ in range(2))
    kept = {name: tensor() for name in DISPATCHER_ATTRIBUTES}
    moe.token_dispatcher = types.SimpleNamespace(**kept, num_experts=8, hidden=tensor())
    other.token_dispatcher = None
    expected = [f"Module.token_dispatcher.{name}" for name in DISPATCHER_ATTRIBUTES]
    assert paths("megatron.dispatcher") == expected
    assert clear_places("megatron.dispatcher") == len(kept)
    assert moe.token_dispatcher.hidden is not None
    assert all(getattr(moe.token_dispatcher, name) is None for name in DISPATCHER_ATTRIBUTES)


def test_rotary_caches_are_those_of_any_rotary_embedding_once(stage: Stage) -> None:
    class RotaryEmbedding(torch.nn.Module):
        @lru_cache(maxsize=32)  # noqa: B019 what Megatron does
        def forward(self, length: int) -> torch.Tensor:
            return tensor()

        @lru_cache(maxsize=32)  # noqa: B019
        def unused(self, length: int) -> torch.Tensor:
            return tensor()

        def plain(self) -> None: ...

    class YarnRotaryEmbedding(RotaryEmbedding):
        @lru_cache(maxsize=32)  # noqa: B019
        def _cached(self, length: int) -> torch.Tensor:
            return tensor()

        @wraps(_cached)
        def forward(self, length: int) -> torch.Tensor:
            return self._cached(length)

    class Positions(torch.nn.Module):
        @lru_cache(maxsize=32)  # noqa: B019
        def forward(self, length: int) -> torch.Tensor:
            return tensor()

    for kind in (RotaryEmbedding, YarnRotaryEmbedding, YarnRotaryEmbedding, Positions):
        stage.keep(kind())(3)
    reading = look("megatron.rotary")
    assert sorted(path for path, _ in reading.places) == [
        "RotaryEmbedding.forward",
        "YarnRotaryEmbedding._cached",
        "YarnRotaryEmbedding.forward",
    ]
    assert reading.nbytes == {"cpu": 3 * NBYTES}
    clear_places("megatron.rotary")
    assert look("megatron.rotary").places == []


def test_the_global_buffer_is_a_filled_dict_of_an_object(stage: Stage) -> None:
    module = stage.module("megatron.core.parallel_state")
    for buffer in ({}, [tensor()], None):
        module.__dict__["_GLOBAL_MEMORY_BUFFER"] = types.SimpleNamespace(buffer=buffer)
        assert paths("megatron.global_buffer") == []


def test_a_checkpoint_in_flight_and_its_writer(stage: Stage) -> None:
    kind = type("AsyncCallsQueue", (), {})
    other = stage.keep(type("CallsQueue", (), {})())
    other.async_calls = [tensor()]
    for calls in (deque(), None, (tensor(),)):
        stage.keep(kind()).async_calls = calls
    assert paths("megatron.async_checkpoint") == []
    for calls in (deque([tensor(), tensor()]), [tensor()]):
        stage.keep(kind()).async_calls = calls
    stage.keep(kind()).persistent_caller = object()
    reading = look("megatron.async_checkpoint")
    assert reading.places == [
        ("AsyncCallsQueue.async_calls", 2 * NBYTES),
        ("AsyncCallsQueue.async_calls", NBYTES),
        ("AsyncCallsQueue.persistent_caller: a writer that keeps CUDA IPC handles", 0),
    ]
    assert reading.entries == 3


def test_caches_of_captured_graphs_are_told_when_filled(stage: Stage) -> None:
    stage.module("megatron.core.gtp", _GTP_CACHE={}, _CG_MEMPOOL=None)
    assert paths("megatron.gtp") == []
