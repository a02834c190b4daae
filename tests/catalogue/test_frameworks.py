"""torchao's and Megatron-LM's structures are told by shape, at their paths, and emptied if they may."""

from __future__ import annotations

import types
from collections import deque
from functools import lru_cache, wraps
from typing import Any

import pytest
import torch

from memtriage.catalogue.frameworks import DISPATCHER_ATTRIBUTES, FRAMEWORKS
from support.holder_looks import assert_found_where_filled, clear_places, look, paths
from support.holder_standins import NBYTES, QuantizedTensor, Stage, tensor

pytestmark = pytest.mark.usefixtures("only_new_objects")

MOE = "torchao.prototype.moe_training.MXFP8OnDeviceAllToAllV"


@pytest.mark.parametrize(
    ("name", "shape", "path", "entries", "cleared"),
    [
        ("torchao.precomputed_scale", 0, "Module.weight", None, 0),
        ("torchao.all_to_all_buffers", 0, f"{MOE}.input_sym_mem_buf", None, 1),
        ("torchao.amax_buffers", 0, "Module.fp8_amax_history_x", None, 0),
        ("megatron.dispatcher", 0, "Module.token_dispatcher.probs", None, 1),
        ("megatron.rotary", 0, "RotaryEmbedding.forward", 1, 1),
        ("megatron.global_buffer", 0, "megatron.core.parallel_state._GLOBAL_MEMORY_BUFFER.buffer", 1, 1),
        (
            "megatron.gtp",
            0,
            "megatron.core.tensor_parallel.generalized_tensor_parallelism._GTP_CACHE",
            None,
            0,
        ),
        ("megatron.gtp", 1, "megatron.core.gtp_cuda_graphs._CG_MEMPOOL", None, 0),
        ("megatron.async_checkpoint", 0, "AsyncCallsQueue.async_calls", 1, 0),
    ],
)
def test_a_structure_is_found_where_it_is_filled_and_only_then(
    name: str, shape: int, path: str, entries: int | None, cleared: int, stage: Stage
) -> None:
    assert_found_where_filled(stage, name, shape, path, entries, cleared)


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


def test_amax_buffers_are_told_by_their_names(stage: Stage) -> None:
    layer = stage.keep(torch.nn.Module())
    for name in ("fp8_amax_x", "fp8_amax_history_x", "fp8_scale_x", "mask"):
        layer.register_buffer(name, tensor())
    assert paths("torchao.amax_buffers") == ["Module.fp8_amax_x", "Module.fp8_amax_history_x"]


def test_delayed_scaling_ended_with_a_version() -> None:
    (entry,) = (entry for entry in FRAMEWORKS if entry.spans)
    assert entry.name == "torchao.amax_buffers"
    (span,) = entry.spans
    assert [span.covers(version) for version in ((0, 1), (0, 8, 9), (0, 9), (1, 0))] == [
        True,
        True,
        False,
        False,
    ]


def test_only_a_dispatcher_s_graphs_are_left_from_finished_steps() -> None:
    assert [entry.name for entry in FRAMEWORKS if entry.transient] == ["megatron.dispatcher"]


def test_an_entry_names_its_library() -> None:
    libraries = {"torchao": ("torchao", ("torchao",)), "megatron": ("Megatron-LM", ("megatron-core",))}
    for entry in FRAMEWORKS:
        first = entry.name.partition(".")[0]
        assert (entry.library, entry.distributions) == libraries[first]
        assert entry.package in (first, "")


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
