"""Which storages are parked."""

from __future__ import annotations

import gc

import torch

from memtriage.treat.parking.choose import choose
from memtriage.treat.parking.registry import PARKED
from memtriage.treat.parking.transfer import park_choice, unpark_entries


def test_an_entry_is_wanted_while_a_tensor_or_the_program_has_its_storage() -> None:
    tensor, kept, lost = torch.ones(3), torch.ones(4), torch.ones(5)
    storage = kept.untyped_storage()
    park_choice(choose([tensor, storage, lost]))
    del kept, lost
    gc.collect()
    wanted = [entry.wanted for entry in PARKED.values()]
    assert wanted == [True, True, False]
    unpark_entries(list(PARKED.values()))
    assert (tensor.tolist(), storage.nbytes(), PARKED) == ([1, 1, 1], 16, {})


def test_a_storage_that_only_the_program_has_comes_back_with_its_values() -> None:
    tensor = torch.arange(10.0)
    storage = tensor.untyped_storage()
    park_choice(choose([storage]))
    del tensor
    assert unpark_entries(list(PARKED.values())).nbytes == 40
    assert torch.equal(torch.empty(0).set_(storage, 0, (10,)), torch.arange(10.0))
