"""Pausing the garbage collector: it is put back to what it was, also in a child forked meanwhile."""

from __future__ import annotations

import gc
import os

import pytest

from memtriage.process.collector import collector_paused


def enabled_in_child() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(gc.isenabled())
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_collection_is_off_in_the_block_alone() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_put_back_after_an_error() -> None:
    with pytest.raises(ValueError), collector_paused():
        raise ValueError
    assert gc.isenabled()


def test_a_program_that_has_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not enabled_in_child()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_forked_in_the_block_collects() -> None:
    with collector_paused():
        assert enabled_in_child()
        assert not gc.isenabled()
    assert enabled_in_child()
