"""The CUDA device's copies, with host memory instead of the device's; and the kernel's table."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.device import cuda
from memtriage.treat.device.copy_kernel import TILE, compiled, ranges_of
from memtriage.treat.device.cuda import CudaDevice
from memtriage.treat.device.protocol import Device
from memtriage.treat.device.simulated import SimulatedDevice
from memtriage.treat.parking import device as ways


@pytest.mark.parametrize("kind", [CudaDevice, SimulatedDevice])
def test_every_operation_of_the_protocol_is_there(kind: type) -> None:
    operations = {name for name in vars(Device) if not name.startswith("_")}
    assert {"entered", "use", "layout", "resize", "copy", "empty_cache"} <= operations
    for name in operations:
        asked, given = getattr(Device, name), getattr(kind, name)
        if callable(asked):
            assert list(inspect.signature(given).parameters) == list(inspect.signature(asked).parameters)


def test_what_parking_calls_is_there() -> None:
    """`CudaWays` runs on a GPU only: here at least the names must be right."""
    called = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(ways)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "_chip"
    }
    assert {"layout", "resize", "empty_cache"} <= called
    assert all(hasattr(CudaDevice, name) for name in called)


@pytest.fixture
def device() -> CudaDevice:
    made = CudaDevice(0)
    made._device = torch.device("cpu")
    return made


@pytest.mark.parametrize("count", [3, 100])
def test_ranges_of_any_size_are_copied(
    device: CudaDevice, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "compiled", lambda _: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    sizes = np.array([1 + 3_000 * index for index in range(count)])
    sizes[1] = cuda.LARGE + 5
    offsets = np.cumsum(sizes) - sizes
    source = torch.randint(0, 255, (int(sizes.sum()),), dtype=torch.uint8)
    target = torch.zeros_like(source)
    device.copy(target.data_ptr() + offsets, source.data_ptr() + offsets, sizes, stream=0)
    assert torch.equal(target, source)


def test_the_host_gets_and_gives_bytes(device: CudaDevice) -> None:
    memory = torch.arange(200, dtype=torch.uint8)
    host = torch.zeros(50, dtype=torch.uint8)
    device.download(host, memory.data_ptr() + 10)
    assert host.tolist() == list(range(10, 60))
    device.upload(memory.data_ptr(), host)
    assert memory.tolist()[:50] == list(range(10, 60))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_a_compiler_there_is_no_kernel() -> None:
    assert compiled(0) is None


@given(st.lists(st.tuples(st.integers(1, 5 * TILE), st.integers(0, 1 << 40)), min_size=1, max_size=50))
def test_every_byte_is_of_one_tile(ranges: list[tuple[int, int]]) -> None:
    sizes = np.array([size for size, _ in ranges])
    sources = np.array([source for _, source in ranges])
    rows, tiles = ranges_of(sources + (1 << 41), sources, sizes)
    assert rows.flags.c_contiguous
    assert (rows[:, 0] == sources + (1 << 41)).all()
    assert (rows[:, 1] == sources).all()
    assert (rows[:, 2] == sizes).all()
    first = rows[:, 3]
    # As the kernel looks it up: the last range whose first tile is not behind.
    number = np.arange(tiles)
    owner = np.searchsorted(first, number, side="right") - 1
    offset = (number - first[owner]) * TILE
    length = np.minimum(sizes[owner] - offset, TILE)
    assert (length > 0).all()
    assert (np.bincount(owner, length, minlength=len(sizes)) == sizes).all()
