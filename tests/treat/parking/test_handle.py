"""What a call of `park` gives back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memtriage.treat.parking.choose import choose
from memtriage.treat.parking.errors import ParkError
from memtriage.treat.parking.registry import PARKED
from memtriage.treat.parking.transfer import park_choice, unpark_entries


def on_device(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_it_brings_back_what_is_still_parked_of_it_and_nothing_else() -> None:
    first, second, other = torch.ones(5), torch.ones(6), torch.ones(7)
    parked, of_other = park_choice(choose([first, second])), park_choice(choose([other]))
    unpark_entries([PARKED[first.untyped_storage()._cdata]])
    assert parked.unpark().nbytes == 24
    assert on_device(first, second, other) == 44
    with pytest.raises(ParkError, match=r"^nothing of what was given is parked \(brought back already\?\)$"):
        parked.unpark()
    assert of_other.unpark().nbytes == 28


def test_the_context_brings_back_what_is_still_parked() -> None:
    first, second = torch.ones(5), torch.ones(6)
    with pytest.raises(KeyError), park_choice(choose([first, second])) as parked:
        assert parked.storages == 2
        unpark_entries([PARKED[first.untyped_storage()._cdata]])
        raise KeyError
    assert on_device(first, second) == 44
    with park_choice(choose([first])) as parked:
        parked.unpark()
    assert first.sum() == 5
