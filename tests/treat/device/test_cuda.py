"""The CUDA device's copies, with host memory instead of the device's."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
import torch

from memtriage.treat.device import cuda
from memtriage.treat.device.cuda import CudaDevice
from memtriage.treat.device.protocol import Device
from memtriage.treat.device.simulated import SimulatedDevice
from memtriage.treat.parking import device as ways


@pytest.mark.parametrize("kind", [CudaDevice, SimulatedDevice])
def test_every_operation_of_the_protocol_is_there(kind: type) -> None:
    operations = {name for name in vars(Device) if not name.startswith("_")}
    assert {"entered", "use", "layout", "resize", "copy", "empty_cache"} <= operations
    for name in operations:
        asked, given = vars(Device)[name], vars(kind)[name]
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
