"""Buffers of FSDP and DDP have an owner while they are allocated."""

import pytest

from memtriage.prediction.distributed.buffers import replacements
from memtriage.prediction.lifetimes import Lifetimes


def test_the_owner_is_what_it_was_before_afterwards():
    lifetimes = Lifetimes(lambda: True)
    lifetimes.owner = "before"
    for _, _, call in replacements(lifetimes):
        with pytest.raises(TypeError):
            call()
        assert lifetimes.owner == "before"
