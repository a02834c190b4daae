"""One launch that copies thousands of ranges of device memory, whatever their sizes.

`torch._foreach_copy_` wants a tensor for every range, and some microseconds of Python for each. This kernel
takes the ranges as a table of addresses: a block of threads copies one tile, 16 bytes a thread at a time.

It is compiled at its first use by NVRTC, which PyTorch's CUDA builds carry, for the GPU at hand (tens of
milliseconds, once in a process); no header and no compiler is needed. Where that fails, `compiled` says so
with None and the caller copies in another way.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)

TILE: Final = 128 << 10
"""Bytes that one block of threads copies: 32 vectors a thread, eight of them in flight at a time."""
THREADS: Final = 256
"""Threads of a block; the kernel counts on it."""
COLUMNS: Final = 3

_NAME: Final = b"copy_tiles"
_SOURCE: Final = rb"""
struct Tile { unsigned long long target, source, size; };

extern "C" __global__ void __launch_bounds__(256) copy_tiles(const Tile* tiles)
{
    const Tile tile = tiles[blockIdx.x];
    unsigned long long vectors = 0;
    if (((tile.target | tile.source) & 15) == 0) {
        uint4* out = reinterpret_cast<uint4*>(tile.target);
        const uint4* in = reinterpret_cast<const uint4*>(tile.source);
        vectors = tile.size >> 4;
        for (unsigned long long at = threadIdx.x; at < vectors; at += 8 * 256) {
            uint4 held[8];
            #pragma unroll
            for (int k = 0; k < 8; ++k)
                if (at + k * 256 < vectors) held[k] = in[at + k * 256];
            #pragma unroll
            for (int k = 0; k < 8; ++k)
                if (at + k * 256 < vectors) out[at + k * 256] = held[k];
        }
    }
    char* out = reinterpret_cast<char*>(tile.target);
    const char* in = reinterpret_cast<const char*>(tile.source);
    for (unsigned long long at = (vectors << 4) + threadIdx.x; at < tile.size; at += 256)
        out[at] = in[at];
}
"""

Int64s = NDArray[np.int64]


def tiles_of(targets: Int64s, sources: Int64s, sizes: Int64s) -> Int64s:
    """The rows (target, source, size) of at most `TILE` bytes that the ranges consist of."""
    counts = -(-sizes // TILE)
    owner = np.repeat(np.arange(len(sizes)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE
    rows = np.empty((len(owner), COLUMNS), np.int64)
    rows[:, 0] = targets[owner] + offset
    rows[:, 1] = sources[owner] + offset
    rows[:, 2] = np.minimum(sizes[owner] - offset, TILE)
    return rows


class CopyKernel:
    """The kernel, loaded on one device."""

    def __init__(self, driver: ctypes.CDLL, function: ctypes.c_void_p) -> None:
        self._driver = driver
        self._function = function

    def launch(self, table: int, tiles: int, stream: int) -> None:
        """Copy the tiles of a table in device memory.

        Raises:
            RuntimeError: the launch was refused.
        """
        argument = ctypes.c_void_p(table)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(argument), ctypes.c_void_p))
        grid = (ctypes.c_uint(tiles), 1, 1)
        block = (THREADS, 1, 1)
        status = self._driver.cuLaunchKernel(
            self._function, *grid, *block, 0, ctypes.c_void_p(stream), arguments, None
        )
        _check("cuLaunchKernel", status)


@functools.cache
def compiled(device: int) -> CopyKernel | None:
    """The kernel for a device, which must be current; None where it cannot be compiled or loaded."""
    try:
        return _load(_compile(device))
    except (OSError, RuntimeError, AttributeError) as error:
        _log.info("the batched copy kernel is not available: %s", error)
        return None


def _compile(device: int) -> bytes:
    import torch

    compiler = _compiler()
    major, minor = torch.cuda.get_device_capability(device)
    option = ctypes.c_char_p(f"--gpu-architecture=sm_{major}{minor}".encode())
    program = ctypes.c_void_p()
    _check("nvrtcCreateProgram", compiler.nvrtcCreateProgram(
        ctypes.byref(program), _SOURCE, b"copy_tiles.cu", 0, None, None
    ))  # fmt: skip
    try:
        _check("nvrtcCompileProgram", compiler.nvrtcCompileProgram(program, 1, ctypes.byref(option)))
        size = ctypes.c_size_t()
        _check("nvrtcGetCUBINSize", compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check("nvrtcGetCUBIN", compiler.nvrtcGetCUBIN(program, binary))
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _compiler() -> ctypes.CDLL:
    """NVRTC. Where it lies in a wheel of its own only torch's library knows the way to it."""
    import torch

    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libcaffe2_nvrtc.so"))
        return ctypes.CDLL(name)


def _load(binary: bytes) -> CopyKernel:
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), binary))
    _check("cuModuleGetFunction", driver.cuModuleGetFunction(ctypes.byref(function), module, _NAME))
    return CopyKernel(driver, function)


def _check(call: str, status: Any) -> None:
    if status != 0:
        raise RuntimeError(f"{call} failed with status {status}")
