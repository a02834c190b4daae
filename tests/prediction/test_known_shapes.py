"""Shapes that are kept are those that the shape functions give, with storages of their own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.prediction.known_shapes import KnownShapes
from memtriage.prediction.operators import facts, tensors_in

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_calls_that_differ_are_told_apart():
    known = KnownShapes()

    def key(*args, **kwargs):
        return known.key(aten.sum.dim_IntList, facts(aten.sum.dim_IntList), args, kwargs)

    x = meta(3, 4)
    keys = [
        key(x, [1]),
        key(x, [0]),
        key(x, [1], True),
        key(x, [1], 1),
        key(x, [1], dtype=torch.float64),
        key(meta(4, 3).t(), [1]),
        key(meta(3, 4, dtype=torch.half), [1]),
        key(x.clone(memory_format=torch.contiguous_format)[:, :2], [1]),
    ]
    assert len(set(keys)) == len(keys)
    assert key(meta(3, 4), [1]) == keys[0]


def through(known, func, args):
    """The call's results, kept ones where there are."""
    key = known.key(func, facts(func), args, {})
    made = known.find(key)
    if made is None:
        made = func(*args)
        known.keep(key, made, args, {})
    return made


def laid_out(tensors):
    """Shapes, strides, types, and which tensors share a storage."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            storages.index(storage),
        )
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


OPERATORS = {
    aten.add.Tensor: ("square", "square"),
    aten.mul.Scalar: ("square", "number"),
    aten.mm.default: ("square", "square"),
    aten.t.default: ("square",),
    aten.clone.default: ("square",),
    aten.relu.default: ("square",),
    aten.add_.Tensor: ("square", "square"),
    aten.slice.Tensor: ("square", "dim", "number"),
    aten._to_copy.default: ("square",),
    aten._unsafe_view.default: ("square", "sizes"),
    aten.max.dim: ("square", "dim"),
    aten.split.Tensor: ("square", "number"),
    aten.cat.default: ("squares", "dim"),
    aten.native_dropout.default: ("square", "number", "flag"),
    aten.var_mean.correction: ("square", "dims"),
}


@given(st.data())
def test_sequences_of_operators_have_the_same_shapes_and_storages(data):
    known = KnownShapes()
    pools = [[meta(4, 4), meta(4, 4, dtype=torch.half), meta(8, 4)[::2], meta(1, 4)] for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 12))):
        func = data.draw(st.sampled_from(list(OPERATORS)))
        picked = [
            data.draw(
                {
                    "square": st.integers(0, len(pools[0]) - 1),
                    "squares": st.lists(st.integers(0, len(pools[0]) - 1), min_size=1, max_size=3),
                    "number": st.sampled_from([1, 2, 1.0, True]),
                    "dim": st.sampled_from([0, 1]),
                    "dims": st.sampled_from([[0], [1], [0, 1]]),
                    "sizes": st.sampled_from([[16], [2, 8], [4, 4]]),
                    "flag": st.booleans(),
                }[kind]
            )
            for kind in OPERATORS[func]
        ]
        made = []
        for pool, call in zip(pools, (func.__call__, None), strict=True):
            args = tuple(
                pool[value]
                if kind == "square"
                else [pool[item] for item in value]
                if kind == "squares"
                else value
                for kind, value in zip(OPERATORS[func], picked, strict=True)
            )
            try:
                made.append(call(*args) if call else through(known, func, args))
            except (RuntimeError, IndexError, TypeError) as error:
                made.append(type(error))
        if isinstance(made[0], type):
            assert made[0] is made[1]
            continue
        for pool, results in zip(pools, made, strict=True):
            pool.extend(tensors_in(results))
        assert laid_out(pools[0]) == laid_out(pools[1])


@pytest.mark.parametrize(
    "made",
    [
        torch.empty(3),
        torch.empty(3, dtype=torch.complex64, device="meta").conj(),
        torch.empty(3, dtype=torch.complex64, device="meta").conj().imag,
        meta(4)[1:],
        meta(4)[:2],
        torch.nn.Parameter(meta(3)),
    ],
    ids=["on the host", "conjugate", "negative", "offset", "part of a storage", "parameter"],
)
def test_results_that_are_no_plain_new_tensor_are_not_kept(made):
    known = KnownShapes()
    arguments = (meta(3),)
    key = known.key(aten.relu.default, facts(aten.relu.default), arguments, {})
    known.keep(key, made, arguments, {})
    assert known.find(key) is None
    known.keep(key, meta(3), arguments, {})
    assert known.find(key).shape == (3,)
    assert known.find(None) is None
