"""One launch that copies thousands of ranges of device memory, whatever their sizes.

`torch._foreach_copy_` needs a tensor for every range, and some microseconds of Python for each. This kernel
takes the ranges as a table of addresses: a block of threads looks up the range of its tile and copies it, 16
bytes per thread at a time.

NVRTC, which is part of PyTorch's CUDA builds, compiles it at its first use for the current GPU (tens of
milliseconds, once in a process); no header and no compiler is needed. If that fails, `compiled` returns None,
and the caller copies in another way.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any, Final

import numpy as np

from memtriage.model.recording import Int64s

_log = logging.getLogger(__name__)

TILE: Final = 128 << 10
"""Bytes that one block of threads copies: 32 vectors per thread, eight of them in flight at a time."""
THREADS: Final = 256
"""Threads of a block; the kernel relies on it."""

_NAME: Final = b"copy_tiles"
_SOURCE: Final = rb"""
struct Range { unsigned long long target, source, size, first; };

extern "C" __global__ void __launch_bounds__(256) copy_tiles(const Range* ranges, unsigned long long count)
{
    // The last range whose first tile is not behind this one: all threads ask at once, so two rounds find it
    // among 65,536. The first answer is always yes.
    unsigned long long low = 0, high = count;
    while (high - low > 1) {
        const unsigned long long step = (high - low + 255) / 256;
        const unsigned long long at = low + threadIdx.x * step;
        const int yes = __syncthreads_count(at < high && ranges[at].first <= blockIdx.x);
        low += (yes - 1) * step;
        high = high < low + step ? high : low + step;
    }
    const Range range = ranges[low];
    const unsigned long long offset = (blockIdx.x - range.first) * TILE_BYTES, rest = range.size - offset;
    const unsigned long long target = range.target + offset, source = range.source + offset;
    const unsigned long long size = rest < TILE_BYTES ? rest : TILE_BYTES;
    unsigned long long vectors = 0;
    if (((target | source) & 15) == 0) {
        uint4* out = reinterpret_cast<uint4*>(target);
        const uint4* in = reinterpret_cast<const uint4*>(source);
        vectors = size >> 4;
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
    char* out = reinterpret_cast<char*>(target);
    const char* in = reinterpret_cast<const char*>(source);
    for (unsigned long long at = (vectors << 4) + threadIdx.x; at < size; at += 256)
        out[at] = in[at];
}
"""


def ranges_of(targets: Int64s, sources: Int64s, sizes: Int64s) -> tuple[Int64s, int]:
    """The kernel's table, rows (target, source, size, index of the first tile), and how many tiles there are.

    Args:
        targets, sources: first bytes.
        sizes: bytes, none of them 0.
    """
    tiles = -(-sizes // TILE)
    until = np.cumsum(tiles)
    return np.stack([targets, sources, sizes, until - tiles], axis=1), int(until[-1])


class CopyKernel:
    """The kernel, loaded on one device."""

    def __init__(self, driver: ctypes.CDLL, function: ctypes.c_void_p) -> None:
        self._driver = driver
        self._function = function

    def launch(self, table: int, ranges: int, tiles: int, stream: int) -> None:
        """Copy the ranges of a table in device memory.

        Args:
            table: its address, as `ranges_of` made it.

        Raises:
            RuntimeError: the launch was refused.
        """
        given = ctypes.c_uint64(table), ctypes.c_uint64(ranges)
        arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(argument) for argument in given))
        grid = (ctypes.c_uint(tiles), 1, 1)
        block = (THREADS, 1, 1)
        status = self._driver.cuLaunchKernel(
            self._function, *grid, *block, 0, ctypes.c_void_p(stream), arguments, None
        )
        _check("cuLaunchKernel", status)


@functools.cache
def compiled(device: int) -> CopyKernel | None:
    """The kernel for a device, which must be current; None if it cannot be compiled or loaded."""
    try:
        return _load(_compile(device))
    except (OSError, RuntimeError, AttributeError) as error:
        _log.info("the batched copy kernel is not available: %s", error)
        return None


def _compile(device: int) -> bytes:
    import torch

    compiler = _compiler()
    major, minor = torch.cuda.get_device_capability(device)
    options = (ctypes.c_char_p * 2)(
        f"--gpu-architecture=sm_{major}{minor}".encode(), f"--define-macro=TILE_BYTES={TILE}ull".encode()
    )
    program = ctypes.c_void_p()
    _check("nvrtcCreateProgram", compiler.nvrtcCreateProgram(
        ctypes.byref(program), _SOURCE, b"copy_tiles.cu", 0, None, None
    ))  # fmt: skip
    try:
        _check("nvrtcCompileProgram", compiler.nvrtcCompileProgram(program, len(options), options))
        size = ctypes.c_size_t()
        _check("nvrtcGetCUBINSize", compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check("nvrtcGetCUBIN", compiler.nvrtcGetCUBIN(program, binary))
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _compiler() -> ctypes.CDLL:
    """NVRTC. If it is in a separate wheel, only torch's library can find it."""
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
