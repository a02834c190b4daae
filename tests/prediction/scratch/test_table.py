"""Which operators have buffers of their own: copies of what is not contiguous, trials of kernels."""

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch.stages import AT_THE_END, BEFORE
from memtriage.prediction.scratch.table import Scratch

aten = torch.ops.aten


class Emptied:
    """What the table tells the trace of its lifetimes."""

    times = 0

    def cache_emptied(self):
        self.times += 1


@pytest.fixture
def emptied():
    return Emptied()


@pytest.fixture
def scratch(emptied):
    return Scratch(machine("h200"), (2, 11), emptied)


def values(rows, columns, dtype=torch.float32):
    return torch.empty(rows, columns, dtype=dtype, device="meta")


PLAIN, ACROSS = values(64, 32), values(32, 64).t()
BYTES = 64 * 32 * 4


@pytest.mark.parametrize(
    ("func", "args", "copies"),
    [
        (aten._softmax.default, (PLAIN, -1, False), []),
        (aten._softmax.default, (ACROSS, -1, False), [BYTES]),
        (aten._log_softmax.default, (values(32, 64, torch.bfloat16).t(), -1, False), [BYTES // 2]),
        # the product of gradient and output is a buffer in any case
        (aten._softmax_backward_data.default, (PLAIN, PLAIN, -1, torch.float32), [BYTES]),
        (aten._softmax_backward_data.default, (PLAIN, ACROSS, -1, torch.float32), [BYTES] * 2),
        (aten._softmax_backward_data.default, (ACROSS, PLAIN, -1, torch.float32), [BYTES] * 2),
        (aten._softmax_backward_data.default, (ACROSS, ACROSS, -1, torch.float32), [BYTES] * 3),
        (aten._log_softmax_backward_data.default, (PLAIN, ACROSS, -1, torch.float32), [BYTES]),
        (aten.sort.default, (ACROSS,), [BYTES]),
        (aten.topk.default, (ACROSS, 4), [BYTES]),
        (aten.upsample_nearest1d.default, (ACROSS, [80]), [BYTES]),
        (aten.upsample_nearest3d_backward.default, (PLAIN, [80], [32]), []),
        (aten.relu.default, (ACROSS,), []),
    ],
)
def test_kernels_that_read_contiguous_memory_copy_the_rest(scratch, func, args, copies):
    outputs = [torch.empty_like(PLAIN)] * 3
    assert scratch(func, args, {}, outputs) == ({AT_THE_END: copies} if copies else {})


@pytest.mark.parametrize(
    ("func", "args", "copies"),
    [
        (aten.native_layer_norm.default, (PLAIN, [32], None, None, 1e-5), 0),
        (aten.native_layer_norm.default, (ACROSS, [32], None, None, 1e-5), 1),
        (aten.native_group_norm.default, (ACROSS, None, None), 1),
        (aten.native_group_norm_backward.default, (PLAIN, ACROSS, None, None), 1),
        (aten.native_group_norm_backward.default, (ACROSS, ACROSS, None, None), 2),
        (aten.roll.default, (ACROSS, [1], [0]), 1),
    ],
)
def test_some_kernels_copy_before_they_allocate_their_results(scratch, func, args, copies):
    found = scratch(func, args, {}, [torch.empty_like(PLAIN)] * 3)
    assert found == ({BEFORE: [BYTES] * copies, 3: []} if copies else {})


IMAGES = torch.empty(2, 8, 16, 16, device="meta")
LARGER = torch.empty(2, 8, 32, 32, device="meta")
PART = torch.empty(2, 24, 32, 32, device="meta")[:, 8:16]
LAST = torch.channels_last
PART_LAST = torch.empty(2, 24, 32, 32, device="meta", memory_format=LAST)[:, 8:16]
BYTES_OF_PART = 2 * 8 * 32 * 32 * 4


@pytest.mark.parametrize(
    ("func", "source", "result", "copied"),
    [
        (aten.upsample_bilinear2d_backward.default, LARGER, IMAGES, False),
        (aten.upsample_bilinear2d_backward.default, LARGER.to(memory_format=LAST), IMAGES, False),
        (aten.upsample_bilinear2d_backward.default, PART, IMAGES, True),
        (aten.upsample_bilinear2d_backward.default, PART_LAST, IMAGES, True),
        (aten.upsample_bilinear2d_backward.default, PART, LARGER, False),
        (aten.upsample_bilinear2d.default, PART, torch.empty(2, 8, 64, 64, device="meta"), False),
        (aten.upsample_nearest2d.default, PART, torch.empty(2, 8, 64, 64, device="meta"), True),
        (aten.upsample_nearest2d_backward.default, PART_LAST, IMAGES, True),
    ],
)
def test_images_are_copied_in_their_layout_where_they_become_larger_or_smaller(
    scratch, func, source, result, copied
):
    found = scratch(func, (source,), {}, [result])
    assert found == ({AT_THE_END: [BYTES_OF_PART]} if copied else {})


def convolved(channels):
    images = torch.empty(8, channels, 16, 16, device="meta")
    weight = torch.empty(4, channels, 3, 3, device="meta")
    return images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1


@pytest.mark.parametrize(
    ("benchmark", "enabled", "times"), [(True, True, 2), (False, True, 0), (True, False, 0)]
)
def test_each_kind_of_convolution_is_tried_once(monkeypatch, scratch, emptied, benchmark, enabled, times):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", enabled)
    assert not scratch.convolved
    for channels in (3, 3, 5, 3):
        scratch.keep(aten.convolution.default, convolved(channels))
    assert scratch.convolved
    assert (emptied.times, scratch.tried) == (times, times > 0)


@pytest.mark.parametrize(
    ("gradient", "given", "copies"), [(ACROSS, PLAIN, 1), (PLAIN, ACROSS, 1), (ACROSS, ACROSS, 2)]
)
def test_the_backward_of_a_layer_norm_holds_its_copies_with_its_own_buffers(scratch, gradient, given, copies):
    row = torch.empty(128 * 1024, 1, device="meta")
    weight = torch.empty(32, device="meta")
    long = torch.empty(128 * 1024, 32, device="meta")
    turned = torch.empty(32, 128 * 1024, device="meta").t()

    def stages(gradient, given):
        args = (gradient, given, [32], row, row, weight, weight, [True] * 3)
        return scratch(aten.native_layer_norm_backward.default, args, {}, [given, weight, weight])

    own = stages(long, long)[AT_THE_END]
    found = stages(*(turned if tensor is ACROSS else long for tensor in (gradient, given)))
    assert found == {BEFORE: [long.nbytes] * copies, 3: own}
    assert sum(own) > 0
