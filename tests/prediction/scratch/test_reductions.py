"""The buffers of reductions, against what was measured and against laws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch import reductions

HOPPER = machine("h200")


def test_the_gradient_of_a_wide_bias_is_as_measured():
    # mlp-wide on an H200: while (4096, 16384) is summed over its rows 142,606,848 bytes more are allocated,
    # of which the counters take a block of 512.
    layout = reductions.layout_of((4096, 16384), (16384, 1), {0})
    partial, counters = reductions.sizes(layout, 4, HOPPER)
    assert (partial + 512, counters) == (142606848, 4 * 128)


@pytest.mark.parametrize(
    ("shape", "reduced", "expected"),
    [
        ((8, 16), {1}, []),
        ((8, 16), {0}, []),
        ((1 << 20,), {0}, True),
        ((1, 1), {0, 1}, []),
    ],
)
def test_small_reductions_need_none(shape, reduced, expected):
    strides = torch.empty(shape, device="meta").stride()
    buffers = reductions.sizes(reductions.layout_of(shape, strides, reduced), 4, HOPPER)
    assert bool(buffers) if expected is True else buffers == expected


def test_dimensions_that_lie_side_by_side_are_one():
    joined = reductions.layout_of((4, 8, 16), (128, 16, 1), {0, 1})
    assert joined == reductions.layout_of((32, 16), (16, 1), {0})


@given(
    shape=st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple),
    chosen=st.integers(0, 15),
)
def test_outputs_times_inputs_are_the_elements(shape, chosen):
    reduced = {dim for dim in range(len(shape)) if chosen >> dim & 1}
    layout = reductions.layout_of(shape, torch.empty(shape, device="meta").stride(), reduced)
    assert layout.outputs * layout.inputs == torch.Size(shape).numel()
    for count in reductions.sizes(layout, 4, HOPPER):
        assert count % 4 == 0


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: (torch.ops.aten.sum.default, (x,), {}), {0, 1, 2}),
        (lambda x: (torch.ops.aten.sum.dim_IntList, (x, [0, -1], True), {}), {0, 2}),
        (lambda x: (torch.ops.aten.sum.dim_IntList, (x, None), {}), {0, 1, 2}),
        (lambda x: (torch.ops.aten.argmax.default, (x, 1), {}), {1}),
        (lambda x: (torch.ops.aten.var.correction, (x, [1]), {}), {1}),
        (lambda x: (torch.ops.aten.linalg_vector_norm.default, (x, 2.0, [2]), {}), {2}),
    ],
)
def test_which_dimensions_are_reduced(call, expected):
    func, args, kwargs = call(torch.empty(2, 3, 4))
    assert reductions.reduced_dimensions(func, args, kwargs) == expected


def layout(inputs, outputs, innermost=True, one_dimension=True, unit_stride=True, vector=4):
    return reductions.Layout(outputs, inputs, innermost, one_dimension, unit_stride, vector)


@pytest.mark.parametrize(
    ("shape", "strides", "reduced", "expected"),
    [
        pytest.param((64,), (1,), {0}, layout(64, 1), id="all"),
        pytest.param((4, 1, 64), (64, 64, 1), {2}, layout(64, 4, one_dimension=False), id="rows"),
        pytest.param((64, 12), (12, 1), {0}, layout(64, 12, False, False), id="columns-by-four"),
        pytest.param((64, 6), (6, 1), {0}, layout(64, 6, False, False, vector=2), id="columns-by-two"),
        pytest.param((64, 7), (7, 1), {0}, layout(64, 7, False, False, vector=1), id="columns-one-by-one"),
        pytest.param((64, 8), (16, 2), {0}, layout(64, 8, False, False, False, 4), id="every-second-column"),
        pytest.param((64,), (2,), {0}, layout(64, 1, unit_stride=False), id="every-second"),
    ],
)
def test_layouts(shape, strides, reduced, expected):
    assert reductions.layout_of(shape, strides, reduced) == expected


def test_one_long_sum_is_split_over_all_multiprocessors():
    # 132 multiprocessors hold 4 blocks of 512 threads each; a block takes at least 16 values a thread.
    assert reductions.sizes(layout(1 << 26, 1), 4, HOPPER) == [4 * 528, 4]
    assert reductions.sizes(layout(1 << 26, 1), 16, HOPPER) == [16 * 528, 4]


@pytest.mark.parametrize(("inputs", "split"), [(4 * 512 * 256 - 4, False), (4 * 512 * 256, True)])
def test_a_sum_is_split_from_256_values_a_thread_on(inputs, split):
    # Four values are loaded at once, so the block is as wide as a quarter of the values allows.
    assert bool(reductions.sizes(layout(inputs, 1), 4, HOPPER)) == bool(
        reductions.sizes(layout(inputs, 1, one_dimension=False), 4, HOPPER)
    )
    assert bool(reductions.sizes(layout(512 * (255 + split), 1, one_dimension=False), 4, HOPPER)) == split


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1), (torch.float64, 2), (torch.bfloat16, 1)])
def test_partial_results_of_double_precision_are_twice_as_wide(dtype, factor):
    def partial(func, *more):
        source = torch.empty(1 << 22, dtype=dtype, device="meta")
        return reductions.buffers(func, (source, *more), {}, [torch.empty(1)], HOPPER)[0]

    assert partial(torch.ops.aten.sum.default) == 4 * factor * (partial(torch.ops.aten.argmax.default) // 16)


def test_empty_reductions_need_none():
    source = torch.empty(0, 4)
    assert reductions.buffers(torch.ops.aten.sum.default, (source,), {}, [torch.empty(1)], HOPPER) == []
    source = torch.empty(1 << 22, device="meta")
    assert reductions.buffers(torch.ops.aten.sum.default, (source,), {}, [torch.empty(0)], HOPPER) == []


@pytest.mark.parametrize(
    ("reduced", "expected"),
    [
        # 64 rows: blocks of 32 x 16 threads, so that 512 values are left for each; 528 blocks in flight are
        # 9 for each row.
        pytest.param(layout(1 << 18, 64, one_dimension=False), [4 * 64 * 9, 4 * 64], id="rows"),
        # 100 columns, four at once: blocks of 16 x 8 threads, two across; a thread takes 16 of 8192 values.
        pytest.param(layout(1 << 16, 100, False, False), [4 * 100 * 512 * 16 * 4, 4 * 2], id="columns"),
        pytest.param(
            layout(256 * 512, 300, one_dimension=False), [4 * 300 * 2, 4 * 300], id="two blocks each"
        ),
        pytest.param(layout(256 * 512, 528, one_dimension=False), [], id="one block each"),
        pytest.param(layout(256 * 512, 529, one_dimension=False), [], id="more rows than blocks in flight"),
        pytest.param(layout(255 * 512, 300, one_dimension=False), [], id="too few values for two"),
        pytest.param(layout(31, 1 << 20, one_dimension=False), [], id="short rows"),
    ],
)
def test_blocks_of_512_threads_share_long_reductions(reduced, expected):
    assert reductions.sizes(reduced, 4, HOPPER) == expected
