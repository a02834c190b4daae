"""The driver's figures, on stand-ins for torch and NVML: the split by process, reasons for not knowing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.observe import cuda, driver

TOTAL, FREE = 1000, 400
UUID = "3f1c"


class NVMLError(Exception):
    pass


class FakeNvml:
    """NVML with one device known by `known`, and its processes."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, known: str = f"GPU-{UUID}", mig: int | None = None) -> None:
        self.known = known
        self.mig = mig
        self.compute: list[tuple[int, int | None]] | None = []
        self.graphics: list[tuple[int, int | None]] | None = None

    def nvmlInit(self) -> None:
        pass

    def _find(self, identifier: str) -> str:
        if identifier != self.known:
            raise NVMLError("Not Found")
        return identifier

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.known

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByPciBusId = _find

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if self.mig is None:
            raise NVMLError("Not Supported")
        return self.mig, self.mig

    def _listed(self, entries: list[tuple[int, int | None]] | None) -> list[Any]:
        if entries is None:
            raise NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in entries]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self._listed(self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return self._listed(self.graphics)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self._listed(None)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """CUDA initialized, one device with a context."""
    properties = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    cuda_module = SimpleNamespace(
        mem_get_info=lambda index: (FREE, TOTAL), get_device_properties=lambda index: properties
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda_module))
    monkeypatch.setattr(cuda, "initialized", lambda: True)
    monkeypatch.setattr(cuda, "has_context", lambda index: index == 0)
    monkeypatch.setattr(cuda, "capturing", lambda: False)
    driver._nvml.cache_clear()
    yield SimpleNamespace(cuda=cuda_module, properties=properties)
    driver._nvml.cache_clear()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def use() -> driver.DriverUse:
    driver_use = driver.driver_use(0)
    assert driver_use is not None
    return driver_use


def test_this_process_is_apart_from_the_others(nvml: FakeNvml) -> None:
    nvml.compute = [(os.getpid(), 300), (4, 100), (5, None)]
    usage = use()
    assert (usage.total, usage.used, usage.own) == (TOTAL, TOTAL - FREE, 300)
    assert usage.processes == ((4, 100), (5, None))
    assert usage.source == "cudaMemGetInfo; use by process from NVML"


def test_a_process_in_several_lists_is_counted_once(nvml: FakeNvml) -> None:
    nvml.compute, nvml.graphics = [(4, None), (5, 70)], [(4, 100), (5, 70)]
    assert use().processes == ((4, 100), (5, 70))


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ([(999_999, 300)], "NVML does not list this process under its own id"),
        ([(os.getpid(), None)], "NVML lists this process without its size"),
    ],
)
def test_an_unknown_own_use_is_none_and_the_source_says_why(
    nvml: FakeNvml, listed: list[tuple[int, int | None]], reason: str
) -> None:
    nvml.compute = listed
    usage = use()
    assert usage.own is None
    assert reason in usage.source


def test_without_a_process_list_the_totals_still_stand(nvml: FakeNvml) -> None:
    nvml.compute = None
    usage = use()
    assert (usage.used, usage.own, usage.processes) == (600, None, ())
    assert "NVML lists no processes" in usage.source


@pytest.mark.parametrize("known", ["00000000:1b:00.0", f"MIG-{UUID}"], ids=["PCI address", "MIG instance"])
def test_a_device_is_found_by_other_identifiers(nvml: FakeNvml, known: str) -> None:
    nvml.known = known
    nvml.compute = [(os.getpid(), 300)]
    assert use().own == 300


def test_processes_of_a_mig_card_are_not_those_of_the_instance(nvml: FakeNvml) -> None:
    nvml.mig = 1
    nvml.compute = [(os.getpid(), 300)]
    usage = use()
    assert usage.own is None and usage.processes == ()
    assert "not the MIG instance" in usage.source


def test_a_device_that_nvml_does_not_know(nvml: FakeNvml, device: SimpleNamespace) -> None:
    nvml.known = "another"
    assert "does not find the device" in use().source
    del device.properties.uuid, device.properties.pci_bus_id
    assert "does not find the device" in use().source


def test_without_nvml_the_totals_still_stand(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert use().source == "cudaMemGetInfo; use by process unknown: NVML: Driver Not Loaded"
    driver._nvml.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in use().source


def test_used_reads_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver.used(0) == TOTAL - FREE
    assert driver._nvml.cache_info().currsize == 0


def test_a_device_without_a_context_is_not_asked(device: SimpleNamespace) -> None:
    del device.cuda.mem_get_info
    assert driver.used(1) is None
    assert driver.explain_driver_use(1) == "this process has no CUDA context on device 1"


def test_reasons_for_not_asking(monkeypatch: pytest.MonkeyPatch, device: SimpleNamespace) -> None:
    def fail(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(device.cuda, "mem_get_info", fail)
    assert driver.driver_use(0) is None
    assert "unspecified launch failure" in str(driver.explain_driver_use(0))
    monkeypatch.setattr(cuda, "capturing", lambda: True)
    assert driver.explain_driver_use(0) == "a CUDA graph is being captured"
    monkeypatch.setattr(cuda, "initialized", lambda: False)
    assert driver.explain_driver_use(0) == "CUDA is not initialized in this process"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"cuda:0": 100}),
        ("0", {"cuda:0": 100}),
        (f"GPU-{UUID}", {"cuda:0": 100}),
        ("GPU-of-nobody", {}),
        ("-1", {}),
        ("", {}),
    ],
)
def test_the_memory_of_another_process(nvml: FakeNvml, visible: str | None, expected: dict[str, int]) -> None:
    nvml.compute = [(4, 100), (5, None)]
    assert driver.process_memory(4, visible) == expected
    assert driver.process_memory(5, visible) == {}
    assert driver.process_memory(6, visible) == {}


def test_the_memory_of_another_process_without_nvml(nvml: FakeNvml) -> None:
    nvml.compute = None
    assert driver.process_memory(4, None) == {}
