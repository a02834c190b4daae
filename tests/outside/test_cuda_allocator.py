"""The statistics of a CUDA allocator are found in memory by what must hold between them."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from memtriage.model.blocks import DeviceCounters
from memtriage.outside.cuda_allocator import CudaAllocator, fitting, parse
from memtriage.outside.memory import ProcessMemory
from support.remote_memory import SIZE, START, hostile_memory

_SOURCE = Path(__file__).parents[1] / "support" / "cuda_allocator.cpp"
_TORCH = Path(torch.__file__).parent
_HEADER = "c10/core/CachingDeviceAllocator.h"
_MIB = 1 << 20


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """An allocator of four devices, of which the second and the third are in use."""
    if shutil.which("g++") is None or not (_TORCH / "include" / _HEADER).exists():
        pytest.skip("no C++ compiler, or no header of this torch")
    library = tmp_path_factory.mktemp("allocator") / "allocator.so"
    folders = [f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}", "-lc10"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(_SOURCE), "-o", str(library), *folders]
    subprocess.run(command, check=True, capture_output=True)
    found = ctypes.CDLL(str(library))
    found.start.restype = ctypes.c_void_p
    return found


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def test_the_counters_of_the_installed_torch_are_found(allocator: ctypes.CDLL) -> None:
    pointer = allocator.start(4)
    reader = CudaAllocator(ProcessMemory(os.getpid()), pointer)
    assert reader.counters() == {}  # no device is in use yet
    for device in (1, 2):
        allocator.segment(device, 1, _long(2 * _MIB))
        allocator.segment(device, 2, _long(20 * _MIB))
        allocator.block(device, 1, 1, _long(1000), _long(1024))
        allocator.split(device, 1, _long(2 * _MIB - 1024))
    allocator.block(1, 2, 1, _long(3 * _MIB + 5), _long(3 * _MIB + 512))
    allocator.block(1, 2, 1, _long(_MIB), _long(_MIB))
    allocator.block(1, 2, -1, _long(_MIB), _long(_MIB))
    allocator.out_of_memory(1)
    found = CudaAllocator(ProcessMemory(os.getpid()), pointer).counters()
    assert found["cuda:1"] == DeviceCounters(
        allocated=3 * _MIB + 512 + 1024, reserved=22 * _MIB, requested=3 * _MIB + 1005,
        active=3 * _MIB + 512 + 1024, peak_allocated=4 * _MIB + 512 + 1024, peak_reserved=22 * _MIB,
        retries=2, ooms=1, inactive_split=2 * _MIB - 1024,
    )  # fmt: skip
    assert list(found) == ["cuda:1", "cuda:2"]
    assert found["cuda:2"].requested == 1000


def test_counters_are_read_as_they_are_now(allocator: ctypes.CDLL) -> None:
    pointer = allocator.start(1)
    allocator.segment(0, 2, _long(20 * _MIB))
    allocator.block(0, 2, 1, _long(_MIB), _long(_MIB))
    reader = CudaAllocator(ProcessMemory(os.getpid()), pointer)
    assert reader.counters()["cuda:0"].allocated == _MIB
    allocator.block(0, 2, 1, _long(_MIB), _long(_MIB))
    assert reader.counters()["cuda:0"].allocated == 2 * _MIB
    allocator.torn(0, _long(512))  # what a reading in the middle of a change looks like
    assert "cuda:0" not in reader.counters()
    allocator.torn(0, _long(-512))
    assert reader.counters()["cuda:0"].allocated == 2 * _MIB


def _statistics(chance: random.Random, gap: int) -> list[int]:
    """The words of a device's statistics after some allocations, with something else in the gap."""
    counters = [[[0, 0, 0, 0] for _ in range(3)] for _ in range(9)]

    def change(which: int, pool: int, amount: int) -> None:
        for at in (0, pool):
            counter = counters[which][at]
            counter[0] += amount
            counter[1] = max(counter[:2])
            counter[2 if amount > 0 else 3] += abs(amount)

    for _ in range(chance.randrange(1, 20)):
        pool = chance.randrange(1, 3)
        size = 512 * chance.randrange(1, 1 << 20)
        free = 512 * chance.randrange(0, 1 << 10)
        change(1, pool, 1)
        change(5, pool, size + free)
        for which, amount in ((0, 1), (2, 1), (4, size), (6, size), (8, size - chance.randrange(512))):
            change(which, pool, amount)
        if free:
            change(3, pool, 1)
            change(7, pool, free)
    words = [word for array in counters for counter in array for word in counter]
    first = 6 * 12
    return [*words[:first], *(chance.randrange(1 << 47) for _ in range(gap)), *words[first:], 0, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 8), st.integers(0, 12))
def test_there_is_one_place_that_fits(seed: int, gap: int, before: int) -> None:
    """Also where an unused part of zeros, or random words, come before and after."""
    chance = random.Random(seed)
    statistics = _statistics(chance, gap)
    around = [chance.choice((0, chance.randrange(1 << 47))) for _ in range(before)]
    words = [*around, *statistics, *around, *[0] * 60]
    assert fitting(words) == [(before, gap)]
    found = parse(statistics, gap)
    assert found is not None and found.reserved == statistics[5 * 12]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_hostile_memory_has_no_counters(seed: int, pointers: bool) -> None:
    chance = random.Random(seed)
    memory = hostile_memory(chance, pointers)
    assert CudaAllocator(memory, START + 8 * chance.randrange(SIZE >> 3)).counters() == {}
