"""Operators whose result depends on data (read from the known values, else a stated default), and those that
run otherwise on the device than under a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from memtriage.prediction.fake_cuda.tensors import CUDA, META, as_device, kernel, true_device
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.notes import Notes
from memtriage.prediction.operators import Args, Kwargs
from memtriage.prediction.values import KnownValues


class Context(Protocol):
    """What a rule may use of the interpreter that calls it."""

    values: KnownValues
    notes: Notes
    lifetimes: Lifetimes

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any: ...


aten: Final = torch.ops.aten

NUMBER: Final = 1
"""What an unknown number is taken for: no division by it fails, no size of it is empty."""

FILLS: Final = frozenset(
    {
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.copy_.default,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
    }
)
"""Operators that write every element of their target, whatever was there."""


def _item(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor: torch.Tensor = args[0]
    known = context.values.of(tensor)
    if known is not None:
        context.values.ask(known)
        return known.item()
    if tensor.dtype is torch.bool:
        context.notes.assume("a condition on unknown values is taken as False")
        return False
    context.notes.assume(f"an unknown number is taken as {NUMBER}")
    return NUMBER if not tensor.is_floating_point() else float(NUMBER)


def _equal(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    left, right = (_known(context, arg) for arg in args[:2])
    if left is not None and right is not None:
        return torch.equal(left, right)
    context.notes.assume("tensors compared as a whole are taken as different")
    return False


def _nonzero(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor: torch.Tensor = args[0]
    known = _known(context, tensor)
    if known is not None:
        positions = context.values.run(aten.nonzero.default, (known,))
        context.values.ask(positions, is_size=True)
        return _known_result(context, func, positions)
    context.notes.assume("every element of an unknown mask is taken as true")
    return _make(context, func, (tensor.numel(), tensor.dim()), torch.int64)


def _masked_select(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    count = _count(context, context.run(aten.expand.default, (args[1], shape), {}))
    return _make(context, func, (count,), args[0].dtype)


def _index(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x[mask]`: the device turns the mask into indices first, one vector a dimension."""
    indices = args[1]
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return NotImplemented
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            continue
        positions = _nonzero(context, aten.nonzero.default, (index,), {})
        expanded.extend(context.run(aten.unbind.int, (positions, 1), {}))
    return context.run(func, (args[0], expanded, *args[2:]), kwargs)


def _unique(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    known = _known(context, args[0])
    if known is not None:
        results = context.values.run(func, (known, *args[1:]), kwargs)
        context.values.ask(results[0], is_size=True)
    else:
        context.notes.assume("unknown elements are taken as all different")
        results = func(torch.arange(args[0].numel()).view(args[0].shape), *args[1:], **kwargs)
    made = []
    for position, result in enumerate(results):
        made.append(_make(context, func, result.shape, args[0].dtype if position == 0 else result.dtype))
        if known is not None:
            context.values.note(made[-1], result)
    return tuple(made)


def _repeat_interleave(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    size = kwargs.get("output_size")
    known = _known(context, args[0])
    if known is not None:
        repeated = context.values.run(aten.repeat_interleave.Tensor, (known,))
        context.values.ask(repeated, is_size=True)
        return _known_result(context, func, repeated)
    if size is None:
        context.notes.assume(f"unknown repeats are taken as {NUMBER} each")
        size = args[0].numel() * NUMBER
    return _make(context, func, (size,), args[0].dtype)


def _bincount(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    known = _known(context, args[0])
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    dtype = torch.int64
    if weights is not None:  # SummaryOps.cu
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    if known is None:
        size = max(least, NUMBER)
        context.notes.assume(f"unknown numbers that are counted are taken as less than {size}")
        return _make(context, func, (size,), dtype)
    counts = context.values.run(aten.bincount.default, (known, None, least))
    context.values.ask(counts, is_size=True)
    result = _make(context, func, counts.shape, dtype)
    if weights is None:
        context.values.note(result, counts)
    return result


def _ctc_loss(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`_ctc_loss` (LossCTC.cu): a loss a sample, and alpha for twice the longest target and one more."""
    steps, batch, _ = args[0].shape  # C++ makes a batch of a single target
    lengths = args[3]
    if isinstance(lengths, torch.Tensor):
        known = _known(context, lengths)
        longest = int(known.max()) if known is not None else args[1].shape[-1]
    else:
        longest = max(lengths)
    losses = _make(context, func, (batch,), args[0].dtype)
    return losses, _make(context, func, (batch, steps, 2 * longest + 1), args[0].dtype)


def _ctc_loss_backward(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _make(context, func, args[1].shape, args[1].dtype)


def _written_in_place(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Autograd's formulas write into zeros that they have just made, but out of place under a dispatch mode
    (`areAnyTensorSubclassLike`, ATen/TensorSubclassLikeUtils.h): here as they do on the device."""
    if torch.is_grad_enabled() or context.lifetimes.phase != "backward":
        return NotImplemented
    if not context.lifetimes.is_newest(args[0].untyped_storage(), "zero"):
        return NotImplemented
    context.run(_IN_PLACE[func], args, kwargs)
    return args[0]


def _rolled(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`roll` over several dimensions: one after the other, and all results are held until the last
    (`roll_common`, TensorTransformations.h)."""
    if len(args) < 3 or len(args[2]) < 2:
        return NotImplemented
    results = [args[0]]
    for shift, dim in zip(args[1], args[2], strict=True):
        results.append(context.run(func, (results[-1], [shift], [dim]), kwargs))
    return results[-1]


def _unscaled(context: Context, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A gradient scaler's check, which writes in place: all is finite, so `found_inf` stays 0."""
    for gradient in args[0]:
        context.values.forget(gradient.untyped_storage()._cdata)


def _known(context: Context, tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if true_device(tensor).type == "cpu" else context.values.of(tensor)


def _count(context: Context, mask: torch.Tensor) -> int:
    known = _known(context, mask)
    if known is not None:
        trues = context.values.run(aten.count_nonzero.default, (known,))
        context.values.ask(trues)
        return int(trues)
    context.notes.assume("every element of an unknown mask is taken as true")
    everything: int = mask.numel()
    return everything


def _known_result(context: Context, func: Any, values: torch.Tensor) -> torch.Tensor:
    """A new tensor on the device, with these values, as the result of `func`."""
    result = _make(context, func, values.shape, values.dtype)
    context.values.note(result, values)
    return result


def _make(context: Context, func: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor on the device, as the result of `func`."""
    with kernel():
        made = torch.empty(shape, dtype=dtype, device=META)
    result = as_device(made, CUDA)
    context.lifetimes.see(result.untyped_storage(), func._schema.name)
    return result


_IN_PLACE: Final[dict[Any, Any]] = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.put.default: aten.put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}

DATA_RULES: Final[dict[Any, Callable[[Context, Any, Args, Kwargs], Any]]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    aten.roll.default: _rolled,
    **dict.fromkeys(_IN_PLACE, _written_in_place),
}
