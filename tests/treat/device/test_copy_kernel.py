"""The kernel that copies many ranges: its table, and how it is compiled and launched."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.device import copy_kernel
from memtriage.treat.device.copy_kernel import THREADS, TILE, CopyKernel, compiled, ranges_of


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


class Driver:
    """Stands in for CUDA's driver and compiler: notes what was launched, and refuses what it is to refuse."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.called: list[str] = []
        self.launched: list[Any] = []
        self.options: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuLaunchKernel":
                given = arguments[9]
                values = [ctypes.cast(each, ctypes.POINTER(ctypes.c_uint64)).contents.value for each in given]
                self.launched.append(([getattr(each, "value", each) for each in arguments[1:9]], values))
            if name == "nvrtcCompileProgram":
                self.options = list(arguments[2])
            if name == "nvrtcGetCUBINSize":
                arguments[1]._obj.value = 5
            if name == "nvrtcGetCUBIN":
                arguments[1].raw = b"cubin"
            if name == "cuModuleLoadData":
                assert arguments[1] == b"cubin"
            if name == "cuModuleGetFunction":
                assert arguments[2] == b"copy_tiles"
                arguments[0]._obj.value = 42
            return 201 if name == self.refuses else 0

        return call


def test_a_launch_has_a_block_for_each_tile() -> None:
    driver = Driver()
    CopyKernel(driver, ctypes.c_void_p(42)).launch(0x7000, 3, 17, stream=9)  # type: ignore[arg-type]
    assert driver.launched == [([17, 1, 1, THREADS, 1, 1, 0, 9], [0x7000, 3])]


def test_a_launch_that_is_refused_is_an_error() -> None:
    kernel = CopyKernel(Driver("cuLaunchKernel"), ctypes.c_void_p(42))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"^cuLaunchKernel failed with status 201$"):
        kernel.launch(0x7000, 3, 17, stream=9)


def compiling(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, lacking: int = 0
) -> tuple[CopyKernel | None, list[str]]:
    """The kernel, and the libraries that were looked for; so many of the first are not there."""
    loaded: list[str] = []

    def library(name: str) -> Driver:
        loaded.append(name.rpartition("/")[2])
        if len(loaded) <= lacking:
            raise OSError(name)
        return driver

    monkeypatch.setattr(copy_kernel, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": library}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return compiled.__wrapped__(0), loaded


CALLS = [
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcDestroyProgram",
    "cuModuleLoadData",
    "cuModuleGetFunction",
]


@pytest.mark.parametrize("refuses", ["", *(name for name in CALLS if name != "nvrtcDestroyProgram")])
def test_the_kernel_is_compiled_for_the_gpu_or_there_is_none(
    refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(refuses)
    made, loaded = compiling(driver, monkeypatch)
    assert (made is None) == bool(refuses)
    made_program = refuses != "nvrtcCreateProgram"
    until = CALLS.index(refuses) + 1 if refuses else len(CALLS)
    assert driver.called == CALLS[:until] + (["nvrtcDestroyProgram"] if made_program and until < 5 else [])
    if not refuses:
        assert loaded == ["libnvrtc.so.12", "libcuda.so.1"]
        assert driver.options == [b"--gpu-architecture=sm_90", b"--define-macro=TILE_BYTES=131072ull"]


def test_a_compiler_in_a_wheel_of_its_own_is_found_by_way_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, loaded = compiling(Driver(), monkeypatch, lacking=1)
    assert made is not None
    assert loaded == ["libnvrtc.so.12", "libcaffe2_nvrtc.so", "libnvrtc.so.12", "libcuda.so.1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_a_compiler_there_is_no_kernel() -> None:
    assert compiled(0) is None
