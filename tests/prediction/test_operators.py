"""What is known of an operator by its schema, and how tensors are found in its arguments."""

from collections import namedtuple

import pytest
import torch
import torch.distributed

from memtriage.prediction.operators import Operator, facts, mapped, tensors_in

aten = torch.ops.aten
FLAGS = ("resizes", "makes", "has_device", "composite", "collective", "communicates")
Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    ("overload", "written", "names", "writes_alone", "flags"),
    [
        (aten.mm.default, (), (), None, "makes"),
        (aten.mm.out, (), ("out",), 1, "resizes"),
        (aten.add_.Tensor, (0,), ("self",), 1, ""),
        (aten.view.default, (), (), None, ""),
        (aten.empty.memory_format, (), (), None, "makes has_device"),
        (aten.resize_.default, (0,), ("self",), 1, "resizes"),
        (aten.set_.source_Tensor, (0,), ("self",), 1, "resizes"),
        (aten.set_data.default, (0,), ("self",), 0, "resizes composite"),
        (aten.aminmax.out, (), ("min", "max"), 2, "resizes"),
        (aten._foreach_add_.Scalar, (0,), ("self",), 0, ""),
        (aten.native_batch_norm.default, (), (), None, "makes"),
        (aten.batch_norm.default, (), (), None, "makes composite"),
        (aten._local_scalar_dense.default, (), (), None, ""),
        (aten.split.Tensor, (), (), None, ""),
        (aten.unbind.int, (), (), None, ""),
        (aten.zeros_like.default, (), (), None, "makes has_device"),
        (
            aten._fused_adam_.default,
            (0, 1, 2, 3, 4),
            ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
            0,
            "",
        ),
        (torch.ops.c10d.allreduce_.default, (), (), None, "makes collective communicates"),
        (torch.ops.c10d.barrier.default, (), (), None, "collective communicates"),
        (torch.ops._c10d_functional.wait_tensor.default, (), (), None, "makes communicates"),
        (torch.ops._c10d_functional.all_reduce.default, (), (), None, "makes communicates"),
    ],
    ids=str,
)
def test_a_schema_says_what_an_operator_writes_and_makes(overload, written, names, writes_alone, flags):
    flagged = dict.fromkeys(flags.split(), True)
    known = {name: flagged.pop(name, False) for name in FLAGS}
    assert flagged == {}
    assert facts(overload) == Operator(
        overload._schema.name, written, names, writes_alone=writes_alone, **known
    )
    assert facts(overload) is facts(overload)


def test_the_targets_of_a_call_are_the_tensors_that_it_writes():
    one, two, three = (torch.zeros(1) for _ in range(3))
    assert facts(aten.add_.Tensor).targets((one, two), {}) == [one]
    assert facts(aten.mm.out).targets((one, two), {"out": three}) == [three]
    assert facts(aten.mm.default).targets((one, two), {}) == []
    assert facts(aten._foreach_add_.Scalar).targets(([one, two], 1.0), {}) == [one, two]
    batch = aten.native_batch_norm.default
    assert facts(batch).targets((one, two, three, None, two, True, 0.1, 1e-5), {}) == []
    assert facts(aten._native_batch_norm_legit.default).targets((one, two, three, None, two, True), {}) == [
        two
    ]
    assert facts(aten.add_.Tensor).targets((), {"self": one}) == [one]


def test_tensors_are_found_in_nests_in_order():
    one, two, three = (torch.zeros(1) for _ in range(3))
    nest = [one, (2, {"a": two, "b": [None, Pair(three, "x")]})]
    assert [id(each) for each in tensors_in(nest, one)] == [id(each) for each in (one, two, three, one)]
    assert tensors_in(1, "a", None, {1, 2}) == []


def test_nests_keep_their_kinds_when_their_tensors_change():
    one, size = torch.zeros(1), torch.Size([2, 3])
    nest = [one, (2, {"a": one, "b": [None, Pair(one, "x")]}), size]
    assert mapped(nest, lambda tensor: "tensor") == [
        "tensor", (2, {"a": "tensor", "b": [None, Pair("tensor", "x")]}), size,
    ]  # fmt: skip
    found = mapped(nest, lambda tensor: tensor)
    assert type(found[1][1]["b"][1]) is Pair and type(found[2]) is torch.Size and found[1] is not nest[1]
