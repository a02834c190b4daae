"""The GPU ledger of another process: from its tensors, its allocator's statistics and the driver. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memtriage.account.gpu_ledger import (
    AWAITING,
    CPP_ONLY,
    OUTSIDE,
    RELEASABLE,
    REQUESTED,
    ROUNDING,
    STRANDED,
    UNEXPLAINED,
)
from memtriage.account.ledger_words import row_of
from memtriage.model.blocks import DeviceCounters
from memtriage.model.ledger import LedgerRow

_UNNAMED: Final = "no tensor was found for it; workspaces, and tensors of the moment between two readings"
_EXPANDABLE: Final = "empty_cache() returns it, but for stranded bytes of expandable segments"
_MOMENTS: Final = "the tensors and the allocator were read at different instants"
_REST: Final = "CUDA context, kernels, free blocks of the allocator, and what only C++ holds"


def gpu_rows(
    owners: Mapping[str, int], counters: DeviceCounters | None, in_use: int | None
) -> list[LedgerRow]:
    """Return the rows of one process's memory on one device; they sum to `in_use` if that is known.

    Args:
        owners: bytes of its tensors by owner.
        counters: of torch's allocator; None if they cannot be read: then the rest is one row.
        in_use: bytes of the process on the device, as the driver counts them; None if it does not say.
    """
    tensors = sorted(owners.items(), key=lambda owner: -owner[1])
    rows = [LedgerRow(row=REQUESTED, bytes=nbytes, owner=owner) for owner, nbytes in tensors]
    known = sum(owners.values())
    if counters is None or counters.requested is None or counters.reserved is None:
        rest = max(0, (in_use or 0) - known)
        return [row for row in [*rows, row_of("rest of the process", rest, _REST)] if row.bytes]
    allocated, active = counters.allocated or 0, counters.active or 0
    stranded, reserved = counters.inactive_split or 0, counters.reserved
    unnamed = counters.requested - known
    rows += [
        LedgerRow(row=REQUESTED, bytes=max(0, unnamed), owner=CPP_ONLY, detail=_UNNAMED),
        row_of(ROUNDING, allocated - counters.requested, "block sizes above what was asked for"),
        row_of(AWAITING, active - allocated, "freed, but a stream that used it is not yet past that point"),
        row_of(RELEASABLE, reserved - active - stranded, _EXPANDABLE),
        row_of(STRANDED, stranded, "free in segments that have live blocks"),
        row_of(OUTSIDE, max(0, (in_use or 0) - reserved), "context, kernels, libraries, NCCL"),
        row_of(UNEXPLAINED, min(0, unnamed), _MOMENTS),
    ]
    return [row for row in rows if row.bytes]
