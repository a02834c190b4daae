"""What torchao and Megatron-LM keep. Source: torchao 0.18 and 0.8, Megatron-LM d98e8a64."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from memtriage.catalogue.contents import class_of
from memtriage.catalogue.entry import Holder, Place, Site
from memtriage.catalogue.finders import (
    ValueSlot,
    attribute,
    container,
    is_filled,
    lru_cache,
    lru_inside,
    only,
    variables,
)
from memtriage.catalogue.scene import Scene
from memtriage.observe.classes import attributes_of, bases_of, instance_dict, name_of

_MEGATRON: Final = "megatron"
_ALL_TO_ALL: Final = "MXFP8OnDeviceAllToAllV"
DISPATCHER_ATTRIBUTES: Final = (
    "probs",
    "routing_map",
    "reversed_local_input_permutation_mapping",
    "local_probs",
    "local_map",
)


def _precomputed_scales(scene: Scene) -> Iterator[Place]:
    for path, module in scene.modules:
        for name, parameter in (attribute(module, "_parameters") or {}).items():
            for inner in (attribute(parameter, "_local_tensor"), parameter):
                if attribute(inner, "_precomputed_scale") is not None:
                    slot = ValueSlot(instance_dict(inner), "_precomputed_scale")
                    yield Place(f"{path}.{name}", slot.values)
                    break


def _all_to_all_buffers(scene: Scene) -> Iterator[Place]:
    tensor = class_of("torch", "Tensor")
    for path, klass, _ in variables("torchao", _ALL_TO_ALL):
        for name, value in list(attributes_of(klass).items()) if issubclass(type(klass), type) else ():
            if issubclass(type(value), tensor):
                slot = ValueSlot(klass, name)
                yield Place(f"{path}.{name}", slot.values, slot.empty)


def _rotary_caches(scene: Scene) -> Iterator[Place]:
    """`lru_cache` on a method: its keys hold the module too."""
    seen: set[int] = set()
    for _, module in scene.modules:
        for klass in bases_of(type(module)):
            if not name_of(klass).endswith("RotaryEmbedding") or id(klass) in seen:
                continue
            seen.add(id(klass))
            for name, member in attributes_of(klass).items():
                wrapper = lru_inside(member)
                if wrapper is not None and wrapper.cache_info().currsize:
                    yield lru_cache(f"{name_of(klass)}.{name}", wrapper)


def _global_buffer(scene: Scene) -> Iterator[Place]:
    for path, buffer, _ in variables(_MEGATRON, "_GLOBAL_MEMORY_BUFFER"):
        kept = attribute(buffer, "buffer")
        if issubclass(type(kept), dict) and kept:
            yield container(f"{path}.buffer", kept)


def _dispatchers(scene: Scene) -> Iterator[Place]:
    tensor = class_of("torch", "Tensor")
    for path, module in scene.modules:
        own = instance_dict(attribute(module, "token_dispatcher")) or {}
        for name in DISPATCHER_ATTRIBUTES:
            if issubclass(type(own.get(name)), tensor):
                slot = ValueSlot(own, name)
                yield Place(f"{path}.token_dispatcher.{name}", slot.values, slot.empty)


def _gtp(scene: Scene) -> Iterator[Place]:
    for path, value, slot in variables(_MEGATRON, "_GTP_CACHE", "_CG_MEMPOOL"):
        if is_filled(value):
            yield Place(path, slot.values)


def _async_saves(scene: Scene) -> Iterator[Place]:
    for queue in scene.instances(lambda kind: name_of(kind) == "AsyncCallsQueue"):
        calls = attribute(queue, "async_calls")
        if issubclass(type(calls), (deque, list)) and calls:
            yield Place("AsyncCallsQueue.async_calls", only(calls), entries=len(calls))
        if attribute(queue, "persistent_caller") is not None:
            yield Place("AsyncCallsQueue.persistent_caller: a writer that keeps CUDA IPC handles")


def _torchao(name: str, **words: Any) -> Holder:
    return Holder(
        name=f"torchao.{name}",
        library="torchao",
        package=words.pop("package", "torchao"),
        distributions=("torchao",),
        **words,
    )


def _megatron(name: str, **words: Any) -> Holder:
    return Holder(
        name=f"megatron.{name}",
        library="Megatron-LM",
        package=words.pop("package", _MEGATRON),
        distributions=("megatron-core",),
        **words,
    )


FRAMEWORKS: Final[tuple[Holder, ...]] = (
    _torchao(
        "precomputed_scale",
        package="",
        kind="statistics",
        symbol="weight._local_tensor._precomputed_scale, by precompute_float8_dynamic_scale_for_fsdp",
        holds="views of one small tensor, which they keep alive, and its segment with it",
        find=_precomputed_scales,
        policy="never",
        why="the next forward reads it; each step writes it again",
        refills="in each step",
    ),
    _torchao(
        "all_to_all_buffers",
        kind="communication",
        symbol="MXFP8OnDeviceAllToAllV: input_sym_mem_buf, scales_sym_mem_buf, grad_out_sym_mem_buf, "
        "grad_input_buf, grad_input_scales_buf and others",
        holds="symmetric buffers as class attributes, of the largest size ever seen",
        find=_all_to_all_buffers,
        clears="set to None",
        refills="at the next exchange, with a rendezvous of all ranks",
        policy="on request",
        why="peers may be using them, and every rank must release them",
        forbidden=("graphs", "backward"),
        owner="communication buffer",
    ),
    _megatron(
        "dispatcher",
        package="",
        kind="activations",
        symbol="module.token_dispatcher: probs, routing_map, reversed_local_input_permutation_mapping, "
        "local_probs, local_map",
        holds="routing tensors with their grad_fn, on a plain object that module.modules() never yields; "
        "with recomputation the graph leads back to it, and everything saved stays alive",
        find=_dispatchers,
        clears="the attributes are set to None",
        refills="in the next forward",
        forbidden=("graphs", "backward"),
        owner="known cache",
        transient=True,
    ),
    _megatron(
        "rotary",
        package="",
        kind="lookup table",
        symbol="RotaryEmbedding.forward, YarnRotaryEmbedding.forward under lru_cache(32)",
        holds="sines and cosines for each sequence length, and by its keys the module",
        find=_rotary_caches,
        clears=".cache_clear()",
        refills="one for each sequence length",
        sites=(
            Site("rotary_pos_embedding.py", frozenset({"forward"})),
            Site("yarn_rotary_pos_embedding.py", frozenset({"forward"})),
        ),
    ),
    _megatron(
        "global_buffer",
        kind="workspace",
        symbol="parallel_state._GLOBAL_MEMORY_BUFFER.buffer",
        holds="scratch of sequence-parallel layers, of the largest size ever seen",
        find=_global_buffer,
        clears=".clear() of its dict (destroy_global_memory_buffer() would also remove the buffer object, "
        "which the next step needs)",
        refills="in the next forward",
        forbidden=("graphs", "backward"),
        sites=(Site("megatron/core/utils.py", frozenset({"get_tensor"})),),
    ),
    _megatron(
        "gtp",
        kind="graphs",
        symbol="tensor_parallel.generalized_tensor_parallelism._GTP_CACHE, gtp_cuda_graphs._CG_MEMPOOL",
        holds="caches, and the memory pool of captured graphs",
        find=_gtp,
        policy="never",
        why="captured graphs may use it",
    ),
    _megatron(
        "async_checkpoint",
        package="",
        kind="model state",
        symbol="AsyncCallsQueue: async_calls, persistent_caller (finalize_async_save)",
        holds="the sharded state of a checkpoint in flight; a persistent writer keeps CUDA IPC handles to "
        "old storages",
        find=_async_saves,
        clears="finalize_async_save(blocking=True), before parameters are offloaded",
        policy="never",
        why="a checkpoint is being written: only the framework can finish it",
        refills="with the next checkpoint",
    ),
)
