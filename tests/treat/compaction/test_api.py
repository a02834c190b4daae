"""`memtriage.compact` where there is no CUDA, and which devices it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memtriage
from memtriage.treat.compaction import api
from memtriage.treat.compaction.result import DeviceCompaction
from memtriage.treat.device.protocol import Use


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
@pytest.mark.parametrize("dry_run", [False, True])
def test_without_cuda_the_result_is_empty_and_says_why(dry_run: bool) -> None:
    done = memtriage.compact(dry_run=dry_run)
    assert done.devices == ()
    assert done.dry_run is dry_run
    assert done.moved == 0
    assert done.before == done.predicted == Use(0, 0)
    assert "CUDA is not in use" in str(done)


@pytest.fixture
def two_of_three(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three devices, of which the process uses the first and the last; returns those that were compacted."""
    done: list[int] = []

    def compacted(device: Any, finder: object) -> DeviceCompaction:
        done.append(device.index)
        return DeviceCompaction(f"cuda:{device.index}", Use(1, 2), Use(1, 2), None)

    monkeypatch.setattr(api, "predict_device", compacted)
    monkeypatch.setattr(api, "CudaDevice", lambda index: SimpleNamespace(index=index))
    monkeypatch.setattr(api.allocator, "initialized", lambda: True)
    monkeypatch.setattr(api.allocator, "backend", lambda: "native")
    monkeypatch.setattr(api.allocator, "capturing", lambda: False)
    monkeypatch.setattr(api.allocator, "devices", lambda: [0, 2])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    return done


@pytest.mark.parametrize(
    ("devices", "compacted"),
    [
        (None, [0, 2]), (0, [0]), ("cuda:2", [2]), ("cuda", [2]), (torch.device("cuda", 0), [0]),
        ([2, "cuda:0", 2], [2, 0]), (1, []), ([], []),
    ],
)  # fmt: skip
def test_which_devices_are_compacted(two_of_three: list[int], devices: Any, compacted: list[int]) -> None:
    done = memtriage.compact(devices, dry_run=True)
    assert two_of_three == compacted and len(done.devices) == len(compacted)


@pytest.mark.parametrize(("devices", "said"), [(3, "no CUDA device 3: .* sees 3"), (-1, "no CUDA device -1")])
def test_a_device_that_is_not_there(two_of_three: list[int], devices: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        memtriage.compact(devices, dry_run=True)
    with pytest.raises(ValueError, match="only CUDA devices can be compacted, not cpu"):
        memtriage.compact("cpu", dry_run=True)
    assert two_of_three == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("backend", "cudaMallocAsync", "cudaMallocAsync"),
        ("capturing", True, "a CUDA graph is being captured"),
    ],
)
def test_when_nothing_can_be_compacted(
    two_of_three: list[int], name: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.allocator, name, lambda: value)
    done = memtriage.compact(dry_run=True)
    assert done.devices == () and said in str(done) and two_of_three == []
