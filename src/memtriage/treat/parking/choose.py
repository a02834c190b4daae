"""Find the storages for arguments of `park` and `unpark`: models, optimizers, tensors and names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from memtriage.treat.parking.handle import ParkError

OwnerName = Literal["parameters", "gradients", "buffers", "optimizer_state"]
OWNER_NAMES: Final[tuple[str, ...]] = get_args(OwnerName)

_GRADIENTS: Final = ("grad", "main_grad")
"""Attributes of a parameter that hold its gradient; `main_grad` is a view of Megatron's gradient buffer."""
_WRAPPED: Final = ("optimizer", "chained_optimizers")
"""Attributes by which wrappers of optimizers (Megatron, DeepSpeed, Accelerate) hold those inside."""
_MASTERS: Final = (
    "shard_fp32_from_float16_groups",  # Megatron's distributed optimizer
    "fp32_from_float16_groups",  # Megatron's mixed-precision optimizer
    "single_partition_of_fp32_groups",  # DeepSpeed ZeRO 1 and 2
    "fp32_partitioned_groups_flat",  # DeepSpeed ZeRO 3
)
"""Attributes of such wrappers that hold float32 master weights."""
_BY_ITSELF: Final = ("parameters", "gradients", "buffers")
"""What a model means without names."""
_DEPTH: Final = 5
"""Levels of nested containers that are searched."""
_SINGLE: Final = (str, Tensor, nn.Module, torch.UntypedStorage, torch.TypedStorage)


@dataclass(slots=True)
class Chosen:
    """One chosen storage, however many tensors view it.

    Attributes:
        owner: what it was found as: `parameter`, `gradient`, `buffer`, `optimizer state`, `tensor`.
        name: a name for messages, e.g. `layers.0.weight`.
        tensors: the tensors through which it was found.
        stream: handle of the stream of its memory, once looked up.
    """

    storage: torch.UntypedStorage
    owner: str
    name: str
    tensors: list[Tensor] = field(default_factory=list)
    stream: int = 0

    @property
    def title(self) -> str:
        """Owner and name."""
        return f"{self.owner} {self.name!r}" if self.name else self.owner


@dataclass(frozen=True, slots=True)
class Selection:
    """Everything that was chosen.

    Attributes:
        storages: each storage once, in the order found.
        modules: those of the given modules and their submodules whose own parameters or buffers are chosen.
        leaves: the parameters whose gradients are chosen: backward adds to these without calling Python.
    """

    storages: list[Chosen]
    modules: list[nn.Module] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)


def choose(what: Iterable[Any]) -> Selection:
    """Return the storages of models, optimizers, tensors, storages and containers of these.

    Names in `what` restrict models and optimizers to these owners. Without names a model means its
    parameters, gradients and buffers, an optimizer its state.

    Raises:
        ParkError: an argument has another type, a name is unknown, or names are given without a model or an
            optimizer.
    """
    given = list(_flat(what, 0))
    names = {item for item in given if isinstance(item, str)}
    unknown = sorted(names - set(OWNER_NAMES))
    if unknown:
        raise ParkError(f"no owner is called {unknown[0]!r}: names are {', '.join(OWNER_NAMES)}")
    holders = [item for item in given if isinstance(item, nn.Module) or is_optimizer(item)]
    if names and not holders:
        raise ParkError(f"{', '.join(sorted(names))}: which model or optimizer? Pass it next to the name")
    storages: dict[int, Chosen] = {}
    modules: list[nn.Module] = []
    leaves: list[Tensor] = []
    for item in given:
        if isinstance(item, str):
            continue
        if isinstance(item, torch.UntypedStorage | torch.TypedStorage):
            untyped = item if isinstance(item, torch.UntypedStorage) else item.untyped()
            storages.setdefault(untyped._cdata, Chosen(untyped, "storage", ""))
            continue
        for owner, name, tensor in _tensors_of(item, names):
            _add(storages, owner, name, tensor)
        if isinstance(item, nn.Module) and (not names or names & {"parameters", "buffers"}):
            modules += item.modules()
        if not isinstance(item, Tensor) and "gradients" in _wanted(item, names):
            leaves += [leaf for _, leaf in _parameters_of(item) if leaf.requires_grad and leaf.is_leaf]
    return Selection(list(storages.values()), modules, leaves)


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer of torch, or wraps one as Megatron and DeepSpeed do."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return not isinstance(value, type) and any(hasattr(value, name) for name in (*_WRAPPED, "param_groups"))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that have the bytes: the inner ones of a wrapper (`DTensor`, Float8), else the tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(_inner(tensor))


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    kind = type(tensor)
    if hasattr(kind, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        held: Iterable[Any] = [getattr(tensor, name) for name in names]
    elif kind not in (Tensor, nn.Parameter) and _is_hollow(tensor):
        held = list(vars(tensor).values())  # TransformerEngine's tensors have no __tensor_flatten__
    else:
        yield tensor
        return
    for part in held:
        if isinstance(part, Tensor) and part is not tensor:
            yield from _inner(part)


def _flat(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _SINGLE) or is_optimizer(value):
            yield value
        elif isinstance(value, Mapping) and depth < _DEPTH:
            yield from _flat(value.values(), depth + 1)
        elif isinstance(value, list | tuple | set | frozenset | Iterator) and depth < _DEPTH:
            yield from _flat(value, depth + 1)
        elif depth == 0:
            raise ParkError(
                f"cannot park {value!r} ({type(value).__name__}): give models, optimizers, tensors, "
                f"storages, containers of these, or one of {', '.join(OWNER_NAMES)}"
            )


def _tensors_of(holder: Any, names: set[str]) -> Iterator[tuple[str, str, Tensor]]:
    """(owner, name, tensor) of everything that was chosen from one model or optimizer."""
    if isinstance(holder, Tensor):
        yield "tensor", "", holder
        return
    wanted = _wanted(holder, names)
    if "optimizer_state" in wanted and not isinstance(holder, nn.Module):
        yield from _state_of(holder, set())
    for name, parameter in _parameters_of(holder):
        if "parameters" in wanted:
            yield "parameter", name, parameter
        if "gradients" in wanted:
            for attribute in _GRADIENTS:
                gradient = getattr(parameter, attribute, None)
                if isinstance(gradient, Tensor):
                    yield "gradient", name, gradient
    if "buffers" in wanted and isinstance(holder, nn.Module):
        for name, buffer in holder.named_buffers():
            yield "buffer", name, buffer


def _wanted(holder: Any, names: set[str]) -> set[str]:
    """Names of the owners to choose from a model or an optimizer."""
    return names or set(_BY_ITSELF if isinstance(holder, nn.Module) else ("optimizer_state",))


def _parameters_of(holder: Any) -> Iterable[tuple[str, Tensor]]:
    return holder.named_parameters() if isinstance(holder, nn.Module) else _stepped_by(holder)


def _stepped_by(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for index, parameter in enumerate(group["params"]):
            yield f"group {number}, {index}", parameter


def _state_of(optimizer: Any, seen: set[int]) -> Iterator[tuple[str, str, Tensor]]:
    """State, master weights and all other tensors of an optimizer, or of those inside it."""
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    own = vars(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        stepped = {id(parameter) for _, parameter in _stepped_by(optimizer)}
        rest = {name: value for name, value in own.items() if name not in ("param_groups", "state")}
        state = ((str(key), value) for entry in optimizer.state.values() for key, value in _items(entry))
        for name, value in (*state, *rest.items()):
            for tensor in tensors_in(value):
                if id(tensor) not in stepped:
                    yield "optimizer state", name, tensor
    for name in _MASTERS:
        for tensor in tensors_in(own.get(name)):
            yield "optimizer state", name, tensor
    for name in _WRAPPED:
        inside = own.get(name)
        for item in inside if isinstance(inside, list | tuple) else [inside]:
            if item is not None and is_optimizer(item):
                yield from _state_of(item, seen)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else [("state", value)]


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEPTH and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif depth < _DEPTH and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth + 1)


def _add(storages: dict[int, Chosen], owner: str, name: str, tensor: Tensor) -> None:
    for part in inner_tensors(tensor):
        storage = storage_of(part)
        if storage is None:
            continue
        chosen = storages.setdefault(storage._cdata, Chosen(storage, owner, name))
        for holder in (tensor, part):
            if not any(holder is known for known in chosen.tensors):
                chosen.tensors.append(holder)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None if it has none of its own (sparse, meta, fake)."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
    return None if storage.device.type == "meta" else storage


def _is_hollow(tensor: Tensor) -> bool:
    """Whether a subclass instance has no bytes itself: its storage has no address."""
    storage = storage_of(tensor)
    try:
        return storage is None or (storage.data_ptr() == 0 and storage.nbytes() > 0)
    except RuntimeError:
        return True
