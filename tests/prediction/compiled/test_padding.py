"""Whether a matrix product is assumed to be padded."""

from __future__ import annotations

import torch

from memtriage.prediction.compiled.padding import pays
from memtriage.prediction.gpu_kinds import machine

H200 = machine("h200")


def test_a_large_unaligned_product_is_padded_where_the_copy_is_free():
    assert pays(H200, torch.bfloat16, (8192, 8192, 8191), (0, 0, 1), 1, (True, True))


def test_a_product_that_is_bound_by_memory_is_left_as_it_is():
    assert not pays(H200, torch.bfloat16, (8192, 8, 8191), (0, 0, 1), 1, (True, True))


def test_a_copy_that_takes_longer_than_it_saves_is_not_made():
    sizes, added = (64, 65536, 50257), (0, 0, 7)
    assert not pays(H200, torch.bfloat16, sizes, added, 1, (False, False))
