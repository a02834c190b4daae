"""How many registers a Triton kernel uses: Inductor tries smaller blocks where a reduction uses many.

Triton compiles for a GPU that is not there: its compiler and NVIDIA's assembler are in its package.
"""

from __future__ import annotations

import struct
from typing import Any, Final

_REGISTER_COUNT: Final = b"\x04\x2f\x08\x00"
"""Attribute of a kernel in a cubin: its form, `EIATTR_REGCOUNT`, its length; symbol and count follow."""

MOST: Final = 255
"""Registers that a thread has at most."""


def registers(tuner: Any, config: Any) -> int | None:
    """The registers of a kernel (`CachingAutotuner`) in one of its configurations; None if not compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(config)
    try:
        compiled = triton.compile(
            ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=GPUTarget("cuda", meta["cc"], tuner.device_props.warp_size or 32),
            options=tuner._create_compile_options(config, meta),
        )
    except Exception:  # where no subprocess may be started, say; the caller knows what to assume
        return None
    return _in_cubin(compiled.asm["cubin"])


def _in_cubin(cubin: bytes) -> int | None:
    place = cubin.find(_REGISTER_COUNT)
    if place < 0:
        return None
    _, count = struct.unpack_from("<II", cubin, place + len(_REGISTER_COUNT))
    return int(count)
