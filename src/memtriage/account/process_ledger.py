"""The GPU memory of another process: its tensors by owner, and what the driver counts besides. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memtriage.account.gpu_ledger import REQUESTED
from memtriage.account.ledger_words import row_of
from memtriage.model.ledger import LedgerRow

_REST: Final = "CUDA context, kernels, free blocks of the allocator, and what only C++ holds"


def gpu_rows(owners: Mapping[str, int], in_use: int | None) -> list[LedgerRow]:
    """Return the rows of one process's memory on one device; they sum to `in_use` if that is known.

    Args:
        owners: bytes of its tensors by owner.
        in_use: bytes of the process on the device, as the driver counts them; None if it does not say.
    """
    tensors = sorted(owners.items(), key=lambda owner: -owner[1])
    rows = [LedgerRow(row=REQUESTED, bytes=nbytes, owner=owner) for owner, nbytes in tensors]
    rest = max(0, (in_use or 0) - sum(owners.values()))
    return [row for row in [*rows, row_of("rest of the process", rest, _REST)] if row.bytes]
