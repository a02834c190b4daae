"""Page-locked memory without an owner, with a driver that only takes notes."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from memtriage.treat.offload import pinned
from memtriage.treat.offload.pinned import PinnedMemory, PinningFailed, host_memory, locked_memory


class Driver:
    """`torch.cuda.cudart()` that locks nothing.

    Attributes:
        calls: what was asked of it, in order.
        status: what a registration returns.
        nbytes: of the last registration.
    """

    def __init__(self, status: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self.status = status

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1, "cudaHostRegisterPortable of cuda_runtime_api.h: for every device"
        self.calls.append(("register", address))
        self.nbytes = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def synchronize(self) -> None:
        self.calls.append(("synchronize", 0))


def install(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Driver:
    driver = Driver(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    return driver


def test_it_is_unlocked_once_with_its_last_view_and_after_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch)
    memory = locked_memory(5 * 4096 + 7)
    assert memory is not None and memory.numel() == 5 * 4096 + 7
    address = memory.data_ptr()
    view = memory[4096:8192].view(torch.bfloat16).view(2, -1)
    view.fill_(3)
    del memory
    gc.collect()
    assert driver.calls == [("register", address)]
    assert bool((view == 3).all())
    del view
    gc.collect()
    assert driver.calls == [("register", address), ("synchronize", 0), ("unregister", address)]


def test_a_forked_child_does_not_unlock_what_its_parent_has(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch)
    memory, owned = locked_memory(4096), PinnedMemory(4096, pin=True)
    monkeypatch.setattr(pinned, "os", SimpleNamespace(getpid=lambda: 0))
    owned.close()
    del memory
    gc.collect()
    assert not owned.pinned and [name for name, _ in driver.calls] == ["register", "register"]


def test_refused_memory_is_none_and_nothing_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, status=2)
    launched = []
    monkeypatch.setattr(torch, "ones", lambda size, device: launched.append(device))
    with pytest.warns(PinningFailed, match=r"refused to page-lock 4\.0 KiB .*cudaError 2.*ulimit -l"):
        assert locked_memory(4096) is None
    with pytest.warns(PinningFailed, match=r"12\.1 KiB"):
        memory = PinnedMemory(12_345, pin=True)
    memory.bytes.fill_(7)
    memory.close()
    assert not memory.pinned
    assert launched == ["cuda", "cuda"]  # takes the driver's error, which the next launch would be blamed for
    gc.collect()
    assert [name for name, _ in driver.calls] == ["register", "register"]


@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_host_memory_has_the_size_that_is_asked_for_and_is_zero(nbytes: int) -> None:
    memory = host_memory(nbytes)
    assert (memory.dtype, memory.numel(), int(memory.sum())) == (torch.uint8, nbytes, 0)


def test_memory_that_the_system_refuses_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"refused 4\.0 EiB of host memory"):
        host_memory(1 << 62)


def test_memory_with_an_owner_is_unlocked_once_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch)
    memory = PinnedMemory(4096, pin=True)
    address = memory.bytes.data_ptr()
    assert memory.pinned and driver.calls == [("register", address)]
    memory.close()
    memory.close()
    assert not memory.pinned
    assert driver.nbytes == 4096
    assert driver.calls == [("register", address), ("unregister", address)]


def test_memory_that_is_not_to_be_locked_never_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch)
    memory = PinnedMemory(4096, pin=False)
    assert not memory.pinned and memory.bytes.numel() == 4096
    memory.close()
    assert driver.calls == []
