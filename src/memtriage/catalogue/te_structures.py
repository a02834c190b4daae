"""How TransformerEngine's structures are recognized. Source: d0067d0d (2.20.0.dev0) and the tags from 2.0 on.

Its quantized tensors are plain objects as well as subclasses of Tensor (`QuantizedTensorStorage`); both keep
their data in attributes such as `_data`, `_transpose`, `_rowwise_data`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from memtriage.catalogue.contents import class_of
from memtriage.catalogue.entry import Place, PlaceFinder
from memtriage.catalogue.finders import (
    ValueSlot,
    attribute,
    container,
    is_filled,
    length,
    only,
    variables,
)
from memtriage.catalogue.scene import Scene
from memtriage.observe.classes import attributes_of, declares, instance_dict, name_of

PACKAGE: Final = "transformer_engine"
_QUANTIZED: Final = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")


def _holds_quantized(value: Any) -> bool:
    tensor = class_of("torch", "Tensor")
    own = instance_dict(value) or {}
    return any(issubclass(type(own.get(name)), tensor) for name in _QUANTIZED)


def tensor_objects(scene: Scene) -> Iterator[Place]:
    """Lists of restored tensors on nodes whose backward has run (#1935)."""
    for node in scene.contexts():
        kept = attribute(node, "tensor_objects")
        if type(kept) is not list or not any(map(_holds_quantized, kept)) or not backward_ran(node):
            continue
        slot = ValueSlot(instance_dict(node), "tensor_objects")
        name = f"{name_of(type(node))}.tensor_objects"
        yield Place(name, slot.values, slot.empty, entries=sum(map(_holds_quantized, kept)))


def backward_ran(node: Any) -> bool:
    """Whether a custom Function's node has been through its backward, and its graph was not retained."""
    try:
        node._raw_saved_tensors  # noqa: B018 reading raises when they are gone
        return False
    except RuntimeError:  # "Trying to backward through the graph a second time ..."
        return True


def fp8_workspaces(scene: Scene) -> Iterator[Place]:
    """The dict of quantized weights of each module."""
    for path, module in scene.modules:
        value = attribute(module, "_fp8_workspaces")
        if issubclass(type(value), dict) and value:
            yield container(f"{path}.fp8_workspaces", value)


def permutation_workspace(scene: Scene) -> Iterator[Place]:
    """Variables of the module in new versions, attributes of the autograd Function in older ones."""
    name, count = "_moe_permute_index_map_workspace", "_moe_permute_index_map_max_expanded_token_num"
    for path, value, slot in variables(PACKAGE, name):
        sizes = {at: where for at, _, where in variables(PACKAGE, count)}
        counters = [where for at, where in sizes.items() if at.rpartition(".")[0] == path.rpartition(".")[0]]
        if is_filled(value):
            yield Place(path, slot.values, _emptied(slot, counters))
    for path, klass, _ in variables(PACKAGE, "_moe_permute_index_map"):
        if issubclass(type(klass), type) and is_filled(attributes_of(klass).get("workspace")):
            slot = ValueSlot(klass, "workspace")
            clear = _emptied(slot, [ValueSlot(klass, "max_expanded_token_num")])
            yield Place(f"{path}.workspace", slot.values, clear)


def _emptied(workspace: ValueSlot, sizes: list[ValueSlot]) -> Callable[[], None]:
    def clear() -> None:
        workspace.put([] if type(workspace.get()) is list else None)
        for size in sizes:
            size.put(0)

    return clear


_STATE_NAMES: Final = (
    "global_amax_buffer",
    "global_amax_history_buffer",
    "global_scale_buffer",
    "fp8_tensors_recompute_buffer",
    "skip_fp8_weight_update_tensor",
)


def global_state(scene: Scene) -> Iterator[Place]:
    """Buffers of `FP8GlobalStateManager`."""
    for path, klass, _ in variables(PACKAGE, "FP8GlobalStateManager"):
        owner: Any = klass
        own = attributes_of(klass) if issubclass(type(klass), type) else {}
        if (state := own.get("quantization_state")) is not None:
            owner, path = instance_dict(state), f"{path}.quantization_state"  # one object in new versions
        for slot, name in ((ValueSlot(owner, name), name) for name in _STATE_NAMES):
            if is_filled(slot.get()):
                yield Place(f"{path}.{name}", slot.values)


def module_state(scene: Scene) -> Iterator[Place]:
    """Scales and quantizers of each module."""
    for path, module in scene.modules:
        for name in ("fp8_meta", "quantizers"):
            value = attribute(module, name)
            if issubclass(type(value), dict) and value:
                yield Place(f"{path}.{name}", only(value))


def _parameters_with(scene: Scene, inner: str, other: str) -> Iterator[tuple[str, Any]]:
    """Quantized parameters that have an inner tensor and another one that suffices without it."""
    tensor = class_of("torch", "Tensor")
    for path, module in scene.modules:
        for name, parameter in (attribute(module, "_parameters") or {}).items():
            own = instance_dict(parameter) or {}
            if all(issubclass(type(own.get(attribute_name)), tensor) for attribute_name in (inner, other)):
                yield f"{path}.{name}", parameter


def transposes(scene: Scene) -> Iterator[Place]:
    """Transposes of parameters that can live on their data alone."""
    for path, parameter in _parameters_with(scene, "_transpose", "_data"):
        if not any(declares(type(parameter), name) for name in ("remove_caches", "update_usage")):
            continue
        slot = ValueSlot(instance_dict(parameter), "_transpose")
        yield Place(f"{path}._transpose", slot.values, functools.partial(_drop_transpose, parameter))


def _drop_transpose(parameter: Any) -> None:
    if declares(type(parameter), "remove_caches"):
        parameter.remove_caches()
    else:
        parameter.update_usage(columnwise_usage=False)


def columnwise(scene: Scene) -> Iterator[Place]:
    """Columnwise copies of parameters that have a rowwise one."""
    for path, parameter in _parameters_with(scene, "_columnwise_data", "_rowwise_data"):
        yield Place(
            f"{path}._columnwise_data", ValueSlot(instance_dict(parameter), "_columnwise_data").values
        )


def marked(scene: Scene) -> Iterator[Place]:
    """Tensors that `clear_tensor_data` passes over."""
    tensor = class_of("torch", "Tensor")
    tensors = scene.instances(lambda kind: issubclass(kind, tensor))
    references = [weakref.ref(kept) for kept in tensors if attribute(kept, "_do_not_clear")]
    if references:
        yield Place(
            "tensors marked _do_not_clear",
            lambda: [reference() for reference in references],
            entries=len(references),
        )


def adam_remainders(scene: Scene) -> Iterator[Place]:
    """int16 states of a fused Adam: together with the bf16 parameter they make its fp32 master."""
    for optimizer in scene.instances(lambda kind: declares(kind, "step")):
        state = attribute(optimizer, "state")
        if not issubclass(type(state), dict) or attribute(optimizer, "param_groups") is None:
            continue
        if next(_remainders(state), None) is not None:
            path = f"{name_of(type(optimizer))}.state[*]['{_REMAINDER}']"
            yield Place(path, functools.partial(_remainders, state))


_REMAINDER: Final = "master_param"


def _remainders(state: dict[Any, Any]) -> Iterator[Any]:
    torch = sys.modules["torch"]
    tensor = class_of("torch", "Tensor")
    for entry in list(dict.values(state)):
        value: Any = entry.get(_REMAINDER) if issubclass(type(entry), dict) else None
        if issubclass(type(value), tensor) and value.dtype == torch.int16:
            yield value


def offload_buffers(scene: Scene) -> Iterator[Place]:
    """A variable in new versions; in older ones an attribute of the handler that a hook holds."""
    yield from loaded_variables("OFFLOAD_SYNCHRONIZER")(scene)
    for handler in scene.instances(lambda kind: "OffloadHandler" in name_of(kind)):
        kept = attribute(handler, _OBJECT_MAP)
        if is_filled(kept):
            yield Place(f"{name_of(type(handler))}.{_OBJECT_MAP}", only(kept), entries=length(kept))


_OBJECT_MAP: Final = "fp8_tensor_object_map"


def loaded_variables(*names: str) -> PlaceFinder:
    """Variables that nothing here clears."""

    def find(scene: Scene) -> Iterator[Place]:
        for path, value, slot in variables(PACKAGE, *names):
            if is_filled(value):
                yield Place(path, slot.values, entries=length(value))

    return find


def release_symmetric_memory() -> None:
    """Call the library's own function.

    Raises:
        RuntimeError: this version has none.
    """
    for _, function, _ in variables(PACKAGE, "release_symm_mem_pool"):
        function()
        return
    raise RuntimeError("this TransformerEngine has no release_symm_mem_pool()")
