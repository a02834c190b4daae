"""Stand-ins for the structures of the libraries in the catalogue, made of torch and fake modules.

A stand-in is a function of a `Stage` and returns a function that fills it: called once to fill, and again
after a clear, as the library's next step would do. Its tensors stay alive as long as the stage.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any, Final

import pytest
import torch

from memtriage.catalogue import pytorch as pytorch_entries
from memtriage.observe.host import PinnedStats

ELEMENTS: Final = 1000
NBYTES: Final = 4 * ELEMENTS
"""Bytes of one tensor of a stand-in."""


class Stage:
    """Pretends until the end of the test that libraries are loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.kept: list[Any] = []

    def module(self, name: str, **variables: Any) -> ModuleType:
        """Put a module, and the packages above it, into `sys.modules`."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            above = ".".join(parts[:end])
            if above not in sys.modules:
                self.patch.setitem(sys.modules, above, ModuleType(above))
        module = sys.modules[name]
        for variable, value in variables.items():
            self.patch.setattr(module, variable, value, raising=False)
        return module

    def keep(self, value: Any) -> Any:
        """Keep an object alive to the end of the test."""
        self.kept.append(value)
        return value


def tensor() -> torch.Tensor:
    """A tensor of `NBYTES` bytes."""
    return torch.ones(ELEMENTS)


class QuantizedStorage:
    """Like TransformerEngine's `QuantizedTensorStorage`: no Tensor, with its data in attributes."""

    def __init__(self, data: torch.Tensor | None = None) -> None:
        self._data = data
        self._transpose: torch.Tensor | None = None
        self._quantizer = object()

    def prepare(self) -> list[torch.Tensor | None]:
        inner = [self._data, self._transpose]
        self._data = self._transpose = None
        return inner

    def restore(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        self._data, self._transpose = tensors[:2]
        return tensors[2:]


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """What `quantized_tensor.prepare_for_saving` does."""
    saved: list[torch.Tensor | None] = []
    objects: list[Any] = []
    for value in tensors:
        if isinstance(value, QuantizedStorage):
            saved += value.prepare()
            objects.append(value)
        else:
            saved.append(value)
            objects.append(None)
    return saved, objects


def restore_from_saved(objects: list[Any], saved: Any) -> list[Any]:
    """What `quantized_tensor.restore_from_saved` does: data goes back into the same objects."""
    rest = list(saved)
    tensors = []
    for storage in objects:
        if storage is None:
            tensors.append(rest.pop(0))
        else:
            rest = storage.restore(rest)
            tensors.append(storage)
    return tensors


class QuantizedLinear(torch.autograd.Function):
    """A Function that saves a quantized copy, as those of TransformerEngine do."""

    restore: Callable[..., list[Any]] = staticmethod(restore_from_saved)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved, ctx.tensor_objects = prepare_for_saving(x, QuantizedStorage(x.detach() * 2))
        ctx.save_for_backward(*saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _, copy = QuantizedLinear.restore(ctx.tensor_objects, ctx.saved_tensors)
        return gradient * copy._data / copy._data * 2


Fill = Callable[[], object]
Standin = Callable[[Stage], Fill]


def _tensor_objects(stage: Stage) -> Fill:
    stage.module("transformer_engine.pytorch")

    def fill() -> None:
        x = torch.ones(ELEMENTS, requires_grad=True)
        out = stage.keep(QuantizedLinear.apply(x))
        out.sum().backward()

    return fill


def _module_dict(package: str, name: str) -> Standin:
    def make(stage: Stage) -> Fill:
        stage.module(package)
        layer = stage.keep(torch.nn.Linear(2, 2))
        setattr(layer, name, {})
        return lambda: getattr(layer, name).update(weight=QuantizedStorage(tensor()))

    return make


def _dict(module: str, name: str) -> Standin:
    def make(stage: Stage) -> Fill:
        cache: dict[Any, Any] = {}
        stage.module(module, **{name: cache})
        stage.module(f"{module}_importer", **{name: cache})  # `from module import name` elsewhere
        return lambda: cache.update({("causal", 8, 8): tensor()})

    return make


def _lru(module: str, name: str, *, bound: int | None = None) -> Standin:
    def make(stage: Stage) -> Fill:
        function = lru_cache(maxsize=bound)(lambda key: tensor())
        stage.module(module, **{name: function})
        return lambda: function(1)

    return make


def _decorated_lru(module: str, name: str) -> Standin:
    """Under a decorator that goes by `functools.wraps`, as those that switch torch.compile off do."""

    def make(stage: Stage) -> Fill:
        function = lru_cache(lambda key: tensor())

        @wraps(function)
        def outer(key: int) -> torch.Tensor:
            return function(key)

        stage.module(module, **{name: outer})
        return lambda: outer(1)

    return make


def _variable(module: str, name: str, make_value: Callable[[], Any] = tensor) -> Standin:
    def make(stage: Stage) -> Fill:
        owner = stage.module(module, **{name: None})
        return lambda: setattr(owner, name, make_value())

    return make


def _permutation(stage: Stage) -> Fill:
    names = ("_moe_permute_index_map_workspace", "_moe_permute_index_map_max_expanded_token_num")
    module = stage.module("transformer_engine.pytorch.permutation", **{names[0]: [], names[1]: 0})

    def fill() -> None:
        if module.__dict__[names[1]] == 0:
            module.__dict__[names[0]] = [tensor()]
            module.__dict__[names[1]] = 8

    return fill


def _permutation_class(stage: Stage) -> Fill:
    class _moe_permute_index_map:
        workspace: Any = None
        max_expanded_token_num = 0

    stage.module("transformer_engine.pytorch.permutation", _moe_permute_index_map=_moe_permute_index_map)

    def fill() -> None:
        if _moe_permute_index_map.max_expanded_token_num == 0:
            _moe_permute_index_map.workspace = tensor()
            _moe_permute_index_map.max_expanded_token_num = 8

    return fill


class QuantizedTensor(torch.Tensor):
    """Like `Float8Tensor`: a wrapper subclass with its data, and its transpose, in attributes."""

    _data: torch.Tensor
    _transpose: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _rowwise_data: torch.Tensor | None

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> QuantizedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._transpose = self._columnwise_data = self._rowwise_data = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(f"{func} was called on a quantized tensor")


class CachingTensor(QuantizedTensor):
    """Since TransformerEngine #1425."""

    def remove_caches(self) -> None:
        self._transpose = None


class OlderTensor(QuantizedTensor):
    """Before."""

    def update_usage(self, *, columnwise_usage: bool) -> None:
        assert not columnwise_usage
        self._transpose = None


def _parameter(kind: type[QuantizedTensor]) -> tuple[torch.nn.Module, QuantizedTensor]:
    model = torch.nn.Module()
    parameter = kind(torch.zeros(1))
    model._parameters["weight"] = parameter  # type: ignore[assignment]
    return model, parameter


def _transpose(kind: type[QuantizedTensor]) -> Standin:
    def make(stage: Stage) -> Fill:
        stage.module("transformer_engine.pytorch")
        model, parameter = _parameter(kind)
        stage.keep(model)
        return lambda: setattr(parameter, "_transpose", tensor())

    return make


def _columnwise(stage: Stage) -> Fill:
    stage.module("transformer_engine.pytorch")
    model, parameter = _parameter(QuantizedTensor)
    stage.keep(model)
    parameter._rowwise_data = torch.zeros(1)
    return lambda: setattr(parameter, "_columnwise_data", tensor())


def _te_symmetric(stage: Stage) -> Fill:
    cache: dict[Any, Any] = {}
    module = "transformer_engine.pytorch.distributed"
    stage.module(module, symmetric_mem_cache=cache, release_symm_mem_pool=cache.clear)
    return lambda: cache.update(group=tensor())


def _global_state(stage: Stage) -> Fill:
    state = types.SimpleNamespace(global_amax_buffer={}, global_scale_buffer={})

    class FP8GlobalStateManager:
        quantization_state = state

        @classmethod
        def reset(cls) -> None:
            raise AssertionError("reset() unregisters modules")

    stage.module("transformer_engine.pytorch.quantization", FP8GlobalStateManager=FP8GlobalStateManager)
    return lambda: state.global_amax_buffer.update(forward=[tensor()])


def _older_global_state(stage: Stage) -> Fill:
    class FP8GlobalStateManager:
        global_amax_buffer: dict[str, Any] = {}

    stage.module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=FP8GlobalStateManager)
    return lambda: FP8GlobalStateManager.global_amax_buffer.update(forward=[tensor()])


def _fp8_meta(stage: Stage) -> Fill:
    stage.module("transformer_engine.pytorch")
    layer = stage.keep(torch.nn.Linear(2, 2))
    layer.fp8_meta = {}
    layer.quantizers = {}
    return lambda: layer.fp8_meta.update(scaling_fwd=types.SimpleNamespace(amax_history=tensor()))


def _adam(stage: Stage) -> Fill:
    class FusedAdam:
        def __init__(self) -> None:
            self.state: dict[Any, Any] = {}
            self.param_groups: list[Any] = []

        def step(self) -> None: ...

    optimizer = stage.keep(FusedAdam())
    remainder = torch.zeros(2 * ELEMENTS, dtype=torch.int16)
    entry = {"master_param": remainder, "exp_avg": torch.zeros(7), "step": 3}
    return lambda: optimizer.state.update({stage.keep(tensor()): entry})


def _marked(stage: Stage) -> Fill:
    stage.module("transformer_engine.pytorch")
    marked = stage.keep(tensor())
    return lambda: setattr(marked, "_do_not_clear", True)


def _precomputed_scale(stage: Stage) -> Fill:
    stage.module("torchao.float8")
    model, parameter = _parameter(QuantizedTensor)
    stage.keep(model)
    local = types.SimpleNamespace(_precomputed_scale=None)
    parameter._local_tensor = local  # type: ignore[attr-defined]
    return lambda: setattr(local, "_precomputed_scale", tensor()[0])


def _all_to_all(stage: Stage) -> Fill:
    class MXFP8OnDeviceAllToAllV:
        input_sym_mem_buf: Any = None
        max_output_rows_per_rank = 7

    stage.module("torchao.prototype.moe_training", MXFP8OnDeviceAllToAllV=MXFP8OnDeviceAllToAllV)
    return lambda: setattr(MXFP8OnDeviceAllToAllV, "input_sym_mem_buf", tensor())


def _dispatcher(stage: Stage) -> Fill:
    stage.module("megatron.core")
    moe = stage.keep(torch.nn.Module())
    moe.token_dispatcher = types.SimpleNamespace(probs=None, routing_map=None, num_experts=8)

    def fill() -> None:
        weight = torch.ones(ELEMENTS, requires_grad=True)
        moe.token_dispatcher.probs = weight * 1.0  # carries a grad_fn: nothing of it is saved for backward

    return fill


def _rotary(stage: Stage) -> Fill:
    class RotaryEmbedding(torch.nn.Module):
        @lru_cache(maxsize=32)  # noqa: B019 what Megatron does
        def forward(self, length: int) -> torch.Tensor:
            return tensor()

    rotary = stage.keep(RotaryEmbedding())
    return lambda: rotary(8)


def _global_buffer(stage: Stage) -> Fill:
    buffer = types.SimpleNamespace(buffer={})
    stage.module("megatron.core.parallel_state", _GLOBAL_MEMORY_BUFFER=buffer)
    return lambda: buffer.buffer.update({("mpu", torch.float32): tensor()})


def _async_save(stage: Stage) -> Fill:
    class AsyncCallsQueue:
        def __init__(self) -> None:
            self.async_calls: deque[Any] = deque()
            self.persistent_caller = None

    queue = stage.keep(AsyncCallsQueue())
    request = types.SimpleNamespace(async_fn_args=({"weight": tensor()},))
    return lambda: queue.async_calls.append(types.SimpleNamespace(async_request=request))


def _cublas(stage: Stage) -> Fill:
    """Without a GPU: CUDA seems to be in use, and the workspaces are a list."""
    kept: list[torch.Tensor] = []
    stage.patch.setattr(pytorch_entries, "initialized", lambda: bool(kept))
    stage.patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", kept.clear, raising=False)
    return lambda: kept.append(tensor())


def _cudagraph_trees(stage: Stage) -> Fill:
    """As torch's: compiled code that outlives its graphs fails when it runs, so it must go first."""
    name = "torch._inductor.cudagraph_trees"
    containers: dict[int, Any] = {}
    compiled: set[int] = set()

    def reset() -> None:
        if compiled:
            raise AssertionError("Running CUDAGraph after shutdown")
        containers.clear()

    def fill() -> None:
        compiled.add(1)
        containers[0] = types.SimpleNamespace(tree_manager=object())

    for each in (name, "torch._dynamo"):
        stage.patch.setitem(sys.modules, each, ModuleType(each))
    stage.module("torch._dynamo", reset=compiled.clear)
    local = types.SimpleNamespace(tree_manager_containers=containers)
    stage.module(name, local=local, reset_cudagraph_trees=reset)
    return fill


def _dynamo(stage: Stage) -> Fill:
    compiled: set[int] = set()
    for name in ("torch._dynamo", "torch._dynamo.convert_frame"):
        stage.patch.setitem(sys.modules, name, ModuleType(name))
    stage.module("torch._dynamo.convert_frame", output_codes=types.SimpleNamespace(seen_ids=compiled))
    stage.module("torch._dynamo", reset=compiled.clear)
    return lambda: compiled.add(1)


def _fsdp(stage: Stage) -> Fill:
    class FSDPCommContext:
        def __init__(self) -> None:
            self.all_gather_state: Any = None
            self.reduce_scatter_states: list[Any] = []

    stage.module("torch.distributed.fsdp")
    context = stage.keep(FSDPCommContext())

    def fill() -> None:
        context.all_gather_state = types.SimpleNamespace(all_gather_result=tensor(), event=None)

    return fill


def _fsdp_reduce_scatter(stage: Stage) -> Fill:
    fill_nothing = _fsdp(stage)
    del fill_nothing
    context = stage.kept[-1]
    return lambda: context.reduce_scatter_states.append(types.SimpleNamespace(input=tensor(), event=None))


def _older_fsdp(stage: Stage) -> Fill:
    class FSDPCommContext:
        reduce_scatter_state: Any

    stage.module("torch.distributed.fsdp")
    context = stage.keep(FSDPCommContext())
    return lambda: setattr(context, "reduce_scatter_state", types.SimpleNamespace(input=tensor()))


def _async_collective(stage: Stage) -> Fill:
    class AsyncCollectiveTensor:
        def __init__(self) -> None:
            self.elem = tensor()
            self.completed = False

    stage.module("torch.distributed._functional_collectives", AsyncCollectiveTensor=AsyncCollectiveTensor)
    return lambda: stage.keep(AsyncCollectiveTensor())


def _nccl(stage: Stage) -> Fill:
    world = types.SimpleNamespace(pg_map={})
    stage.module("torch.distributed.distributed_c10d", _world=world)
    return lambda: world.pg_map.update({object(): ("nccl", None)})


def _offload_pool(stage: Stage) -> Fill:
    pool: dict[Any, Any] = {}
    module = "torch._functorch._activation_offloading.offload_ops"
    for name in (module.rpartition(".")[0], module):
        stage.patch.setitem(sys.modules, name, ModuleType(name))
    stage.module(module, _pinned_pool=pool, _wait_registry={})
    return lambda: pool.update({(ELEMENTS, torch.float32): [tensor()]})


def _pinned_cache(stage: Stage) -> Fill:
    free = {"host": 0}

    def stats() -> PinnedStats:
        return PinnedStats(owned=free["host"] + 1, active=1, cached=free["host"])

    stage.patch.setattr(pytorch_entries, "pinned", stats)
    stage.patch.setattr(torch.accelerator, "empty_host_cache", lambda: free.update(host=0), raising=False)
    return lambda: free.update(host=NBYTES)


def _conv_benchmark(stage: Stage) -> Fill:
    stage.patch.setattr(pytorch_entries, "initialized", lambda: True)
    stage.patch.setattr(torch.backends.cudnn, "benchmark", False)
    return lambda: setattr(torch.backends.cudnn, "benchmark", True)


def _do_bench(stage: Stage) -> Fill:
    stage.module("triton")
    stage.module("triton.testing")
    stage.patch.setattr(pytorch_entries, "running_frames", lambda skip: running)
    running: list[Any] = []
    code = types.SimpleNamespace(co_name="do_bench")
    frame = types.SimpleNamespace(f_code=code, f_globals={"__name__": "triton.testing"})
    return lambda: running.append((None, frame))


def _generic_lru(stage: Stage) -> Fill:
    function = stage.keep(lru_cache(maxsize=None)(lambda key: tensor()))
    function.__module__, function.__qualname__ = "program", "causal_mask"
    return lambda: function(1)


def _class_attribute(stage: Stage) -> Fill:
    class Holding:
        table: Any = None

    stage.keep(Holding)
    return lambda: setattr(Holding, "table", {"rope": tensor()})


def _module_attribute(stage: Stage) -> Fill:
    layer = stage.keep(torch.nn.Linear(2, 2))
    layer.alias = layer.weight.data  # shares the storage of a parameter: nothing of its own
    return lambda: setattr(layer, "cache", {"keys": [tensor()]})


def _plain_object(stage: Stage) -> Fill:
    layer = stage.keep(torch.nn.Linear(2, 2))
    layer.helper = types.SimpleNamespace(scratch=None)
    return lambda: setattr(layer.helper, "scratch", tensor())


def _function(stage: Stage) -> Fill:
    def fill() -> None:
        held = tensor()

        def read() -> torch.Tensor:
            return held

        stage.keep(read)

    return fill


class Scaled(torch.autograd.Function):
    """A program's own Function, which keeps a tensor where backward does not free it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.table = tensor()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def _context(stage: Stage) -> Fill:
    return lambda: stage.keep(Scaled.apply(torch.ones(1, requires_grad=True)))


def _offload_handler(stage: Stage) -> Fill:
    class AsyncDoubleBufferGroupOffloadHandler:
        def __init__(self) -> None:
            self.fp8_tensor_object_map: dict[Any, Any] = {}

    stage.module("transformer_engine.pytorch")
    handler = stage.keep(AsyncDoubleBufferGroupOffloadHandler())
    return lambda: handler.fp8_tensor_object_map.update({0: QuantizedStorage(tensor())})


_TE: Final = "transformer_engine.pytorch"
_ATTENTION: Final = f"{_TE}.attention.dot_product_attention"

STANDINS: Final[dict[str, list[Standin]]] = {
    "te.tensor_objects": [_tensor_objects],
    "te.fp8_workspaces": [_module_dict(_TE, "_fp8_workspaces")],
    "te.dummy_wgrads": [_dict(f"{_TE}.module.base", "_dummy_wgrads")],
    "te.cublas_workspace": [
        _lru(f"{_TE}.cpp_extensions.gemm", "get_cublas_workspace"),
        _decorated_lru(f"{_TE}.cpp_extensions.gemm", "get_cublas_workspace"),
        _variable(f"{_TE}.module.base", "_cublas_workspace"),
        _variable(f"{_TE}.module.base", "_multi_stream_cublas_workspace", lambda: [tensor()]),
    ],
    "te.gemm_tables": [
        _lru(f"{_TE}.cpp_extensions.gemm", name)
        for name in (
            "_get_fp32_ones_tensor",
            "_get_fp32_zeros_tensor",
            "_get_grouped_gemm_setup_workspace",
            "_get_grouped_cublas_workspace",
        )
    ],
    "te.cached_ones": [_lru(f"{_TE}.utils", name) for name in ("get_cached_ones_tensor", "_empty_tensor")],
    "te.fp4_tables": [
        _lru(f"{_TE}.tensor.nvfp4_tensor", "get_rht_matrix", bound=8),
        _lru(f"{_TE}.tensor.storage.nvfp4_tensor_storage", "_fp4_e2m1_vals"),
    ],
    "te.causal_mask": [_dict(f"{_ATTENTION}.softmax", "_default_causal_mask")],
    "te.cu_seqlens": [
        _dict(f"{_ATTENTION}.utils", "_cu_seqlens_cache"),
        *(
            _dict(f"{_ATTENTION}.context_parallel", name)
            for name in (
                "_cu_seqlens_info_with_cp_cache",
                "_seq_chunk_ids_cache_for_reordering_before_attn",
                "_seq_chunk_ids_cache_for_reordering_after_attn",
                "_softmax_offset_chunk_ids_cache",
            )
        ),
    ],
    "te.flex_attention": [
        _dict(f"{_ATTENTION}.flex_attention", name) for name in ("_cudnn_score_mod_handles", "_graph_cache")
    ],
    "te.permutation_workspace": [_permutation, _permutation_class],
    "te.float8_transpose": [_transpose(CachingTensor), _transpose(OlderTensor)],
    "te.columnwise_data": [_columnwise],
    "te.symmetric_memory": [_te_symmetric],
    "te.userbuffers": [_variable(f"{_TE}.module.base", "_ub_communicators", lambda: {"qkv": object()})],
    "te.global_state": [_global_state, _older_global_state],
    "te.fp8_meta": [_fp8_meta],
    "te.adam_remainders": [_adam],
    "te.cpu_offload": [
        _variable(f"{_TE}.cpu_offload", "OFFLOAD_SYNCHRONIZER", lambda: types.SimpleNamespace(b=tensor())),
        _offload_handler,
    ],
    "te.do_not_clear": [_marked],
    "torchao.precomputed_scale": [_precomputed_scale],
    "torchao.all_to_all_buffers": [_all_to_all],
    "megatron.dispatcher": [_dispatcher],
    "megatron.rotary": [_rotary],
    "megatron.global_buffer": [_global_buffer],
    "megatron.gtp": [
        _dict("megatron.core.tensor_parallel.generalized_tensor_parallelism", "_GTP_CACHE"),
        _variable("megatron.core.gtp_cuda_graphs", "_CG_MEMPOOL"),
    ],
    "megatron.async_checkpoint": [_async_save],
    "torch.cublas_workspaces": [_cublas],
    "torch.cudagraph_trees": [_cudagraph_trees],
    "torch.dynamo": [_dynamo],
    "torch.symmetric_memory": [
        _dict("torch.distributed._symmetric_memory", name)
        for name in ("_group_name_to_workspace_tensor", "_symm_mem_pools")
    ],
    "fsdp2.communication": [_fsdp, _fsdp_reduce_scatter, _older_fsdp],
    "torch.async_collectives": [_async_collective],
    "torch.nccl": [_nccl],
    "torch.offload_pool": [_offload_pool],
    "torch.pinned_cache": [_pinned_cache],
    "torch.conv_benchmark": [_conv_benchmark],
    "triton.do_bench": [_do_bench],
    "generic.lru_cache": [_generic_lru],
    "generic.module_containers": [_dict("program.tables", "TABLES")],
    "generic.class_attributes": [_class_attribute],
    "generic.module_attributes": [_module_attribute],
    "generic.plain_objects": [_plain_object],
    "generic.contexts": [_context],
    "generic.functions": [_function],
}
"""Each entry's stand-ins: one for each shape in which versions of the library have it."""

WITHOUT_STORAGES: Final = frozenset(
    ["te.userbuffers", "torch.cublas_workspaces", "torch.cudagraph_trees", "torch.dynamo", "torch.nccl",
     "torch.conv_benchmark", "triton.do_bench"]
)  # fmt: skip
"""Entries whose memory is not in storages: they are told, without bytes."""
