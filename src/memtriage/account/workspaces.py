"""The workspaces that torch keeps for cuBLAS: which sizes they have, and which blocks they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from memtriage.model.blocks import Block, Segment


class WorkspaceSizes(msgspec.Struct, frozen=True):
    """Sizes of the workspaces that torch keeps for cuBLAS and cuBLASLt, in bytes."""

    cublas: frozenset[int]
    cublaslt: frozenset[int]


def workspace_sizes(config: str | None = None, lt_config: str | None = None) -> WorkspaceSizes:
    """Return the sizes that torch's cuBLAS workspaces can have.

    Source: `parseChosenWorkspaceSize` and `parseCUDABlasLtWorkspaceSize` in CublasHandlePool.cpp: pairs
    `:SIZE:COUNT` in KiB; by default 32 MiB on Hopper (in newer sources Blackwell too) and `:4096:2:16:8` =
    8,519,680 elsewhere; cuBLASLt, where it does not share the former, 1 MiB.

    Args:
        config: value of `CUBLAS_WORKSPACE_CONFIG`, if set.
        lt_config: value of `CUBLASLT_WORKSPACE_SIZE` (KiB), if set.
    """
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    chosen = {sum(int(size) * int(count) for size, count in pairs) << 10} if pairs else {32 << 20, 8_519_680}
    lt_kib = int(lt_config) if lt_config and lt_config.isdecimal() else 1024
    return WorkspaceSizes(cublas=frozenset(chosen - {0}), cublaslt=frozenset({lt_kib << 10} - {0}))


DEFAULT_WORKSPACES: Final = workspace_sizes()

HANDLES_PER_STREAM: Final = 2
"""A workspace belongs to a (cuBLAS handle, stream), a handle to a thread: forward's and backward's."""


def cublas_blocks(blocks: Sequence[tuple[Segment, Block]], sizes: WorkspaceSizes) -> frozenset[int]:
    """Return the addresses of those unclaimed blocks that fit a cuBLAS workspace.

    More blocks of one size on one stream than there are handles means that some of them are something else;
    since it is unknown which, none is taken. The small cuBLASLt size is common, so it needs a cuBLAS
    workspace on the same stream beside it.
    """
    groups: defaultdict[tuple[tuple[int, int], int, int], list[int]] = defaultdict(list)
    for segment, block in blocks:
        if block.requested in sizes.cublas or block.requested in sizes.cublaslt:
            groups[segment.pool, segment.stream, block.requested].append(block.address)
    fitting = {key: addresses for key, addresses in groups.items() if len(addresses) <= HANDLES_PER_STREAM}
    used_by_cublas = {(pool, stream) for pool, stream, size in fitting if size in sizes.cublas}
    return frozenset(
        address
        for (pool, stream, size), addresses in fitting.items()
        if size in sizes.cublas or (pool, stream) in used_by_cublas
        for address in addresses
    )
