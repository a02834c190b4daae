"""Which storages are parked."""

from __future__ import annotations

import gc

import torch

from memtriage.treat.parking.choose import choose
from memtriage.treat.parking.registry import PARKED, entry_of, parked_bytes, title_of
from memtriage.treat.parking.transfer import park_choice, unpark_entries


def test_a_parked_tensor_is_known_by_its_storage() -> None:
    tensor, other = torch.arange(10.0), torch.ones(3)
    view, sparse = tensor[5:], torch.ones(2, 2).to_sparse()
    assert entry_of(tensor) is None
    park_choice(choose([tensor]))
    (entry,) = PARKED.values()
    assert entry_of(tensor) is entry_of(view) is entry
    assert (entry.key, entry.nbytes, entry.stream, entry.arriving) == (
        tensor.untyped_storage()._cdata, 40, 0, False,
    )  # fmt: skip
    assert [title_of(each) for each in (tensor, view, other, sparse)] == ["tensor", "tensor", None, None]
    unpark_entries([entry])
    assert (entry_of(tensor), title_of(tensor)) == (None, None)


def test_bytes_are_of_some_entries_or_of_all() -> None:
    first, second = torch.ones(3), torch.ones(4)
    assert parked_bytes() == 0
    park_choice(choose([first, second]))
    entries = list(PARKED.values())
    assert (parked_bytes(), parked_bytes(entries[:1]), parked_bytes([])) == (28, 12, 0)
    assert entries[0].serial < entries[1].serial
    unpark_entries(entries)
    assert torch.equal(second, torch.ones(4))


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
