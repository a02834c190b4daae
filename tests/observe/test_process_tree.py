"""The processes below one: which they are, how large, and what the program calls them."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from memtriage.observe import process_tree
from memtriage.observe.process_tree import (
    Named,
    children_of_program,
    command_of,
    descendants,
    is_helper,
    name_of_loader,
    sizes_of,
    started_at,
    unmapped_segments,
)
from support.jobs import job_of

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
MIB = 1 << 20


def test_descendants_are_children_and_their_children_as_long_as_they_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with job_of("print('ready', flush=True); input()") as child:
        assert child.pid in descendants() and child.pid not in descendants(child.pid)
        with monkeypatch.context() as patch:
            patch.setattr(process_tree, "_kernel_lists_children", lambda: False)
            assert child.pid in descendants()
        assert started_at(child.pid) == started_at(child.pid) is not None
        assert "input()" in command_of(child.pid) and not is_helper(child.pid)
        sizes = sizes_of(child.pid)
        assert sizes is not None and 0 < sizes.anonymous < 1 << 30
    assert child.pid not in descendants()
    assert sizes_of(child.pid) is None and command_of(child.pid) == ""


def test_what_a_process_has_written_is_in_its_anonymous_memory() -> None:
    before = sizes_of(os.getpid())
    kept = bytearray(b"x" * (64 * MIB))
    after = sizes_of(os.getpid())
    assert before is not None and after is not None
    assert after.anonymous - before.anonymous >= len(kept) // 2


def test_an_executors_processes_are_named_by_it() -> None:
    with ProcessPoolExecutor(2) as pool:
        pids = {pool.submit(os.getpid).result()} | set(pool._processes or {})
        named: dict[int, Named] = {}
        for pid, name in children_of_program():
            named.setdefault(pid, name)
        roles = {named[pid].role for pid in pids}
        assert all(role.startswith("process ") and "ProcessPoolExecutor" in role for role in roles)
        assert len(roles) == len(pids)
        assert {named[pid].where for pid in pids} == {"child"}


class Trainer:
    def __init__(self, loader: Any) -> None:
        self.train_loader = loader

    def name(self) -> str:
        return name_of_loader(self.train_loader, sys._getframe())


class Loader:
    def __init__(self) -> None:
        self.dataset = [1]


def nameless(frame: FrameType | None) -> str:
    return name_of_loader(Loader(), frame)


def test_a_loader_has_the_name_of_its_variable_its_attribute_or_its_data() -> None:
    pytest.importorskip("torch")
    batches = Loader()
    assert name_of_loader(batches, sys._getframe()) == "batches"
    assert Trainer(Loader()).name() == "train_loader"
    assert nameless(None) == "the loader of list"


def test_segments_are_counted_once_and_not_while_a_process_has_mapped_them() -> None:
    """Two descriptors of one segment, another that is mapped, and one by name, as torch names them."""
    size = 3 * 4096
    before = unmapped_segments([os.getpid()])
    with ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile(dir="/dev/shm")) for _ in range(2)]
        for file in files:
            file.write(b"x" * size)
            file.flush()
        opened.callback(os.close, os.dup(files[0].fileno()))
        assert unmapped_segments([os.getpid()]) - before == 2 * size
        with mmap.mmap(files[1].fileno(), size):
            assert unmapped_segments([os.getpid()]) - before == size
        named = Path(f"/dev/shm/torch_{os.getpid()}_7_0")
        opened.callback(named.unlink)
        named.write_bytes(b"x" * size)
        assert unmapped_segments([os.getpid()]) - before == 3 * size
        assert unmapped_segments([]) == 0
