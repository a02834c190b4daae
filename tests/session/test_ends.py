"""The record's first line, and how the end of a run is put in words."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import psutil
import pytest

from memtriage.model.blocks import DeviceCounters
from memtriage.observe import cuda
from memtriage.observe.cgroup import host_limit
from memtriage.session.ends import Terminated, allocator_peaks, exception_text, start_record, torch_version
from memtriage.store.layout import RankIdentity
from memtriage.store.records import SCHEMA
from support.builds import versions_of_torch


def test_a_record_begins_with_who_runs_where() -> None:
    identity = RankIdentity(run_id="job", rank=3, world_size=8, local_rank=1, restart=2)
    start = start_record(identity, ["train.py", "--lr", "1"], os.getpid(), 1234.5)
    assert {name: getattr(start, name) for name in start.__struct_fields__ if name != "pid_start"} == {
        "schema": SCHEMA, "run_id": "job", "restart": 2, "rank": 3, "world_size": 8, "local_rank": 1,
        "pid": os.getpid(), "host": socket.gethostname(), "argv": ["train.py", "--lr", "1"],
        "python": platform.python_version(), "torch": torch_version(), "time": 1234.5,
        "host_limit": host_limit().bytes,
    }  # fmt: skip
    ticks = os.sysconf("SC_CLK_TCK")
    started = psutil.Process().create_time() - psutil.boot_time()
    assert start.pid_start is not None and abs(start.pid_start / ticks - started) < 2


def test_the_version_of_torch_is_known_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_version() in versions_of_torch()


def test_the_version_of_torch_is_that_which_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = ModuleType("torch")
    torch.__version__ = 2.5
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert torch_version() == "2.5"
    monkeypatch.delitem(sys.modules, "torch")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert torch_version() is None


@pytest.mark.parametrize(
    ("exception", "text"),
    [
        (ValueError("no data here"), "ValueError: no data here"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Terminated("terminated by SIGTERM"), "terminated by SIGTERM"),
    ],
)
def test_an_end_has_its_type_and_message(exception: BaseException, text: str) -> None:
    assert exception_text(exception) == text


def test_peaks_are_those_of_devices_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {0: (5, 9), 1: (None, 9), 2: (5, None), 10: (0, 0)}
    monkeypatch.setattr(
        cuda,
        "counters",
        lambda device: DeviceCounters(peak_allocated=peaks[device][0], peak_reserved=peaks[device][1]),
    )
    assert allocator_peaks(["cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:10", "host"]) == (
        {"cuda:0": 5, "cuda:10": 0},
        {"cuda:0": 9, "cuda:10": 0},
    )
