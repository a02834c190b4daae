"""The closed ledger: rows that never overlap and always sum to the measured total."""

from __future__ import annotations

from typing import Final

import msgspec

from memtriage.model.bounds import Whole

CPU_TENSORS: Final = "CPU tensors"
MALLOC_IN_USE: Final = "malloc in use"
PYTHON_OBJECTS: Final = "Python objects"
"""Rows of the host's ledger whose bytes have holders."""
SHARED_ROWS: Final = ("shared memory", "shared anonymous memory")
"""Those of shared memory without tensors."""


class LedgerRow(msgspec.Struct, kw_only=True):
    """One row of a ledger.

    Attributes:
        row: what kind of bytes, e.g. `requested`, `rounding`, `stranded`, `outside the allocator`.
        bytes: size of the row. Never negative, except in a row `unexplained`, which closes the sum.
        owner: what the bytes are (parameter, gradient, ...); None when the row has no owner.
        detail: more about it: holder path, pool, what was counted.
    """

    row: str
    bytes: Whole
    owner: str | None = None
    detail: str | None = None


class Ledger(msgspec.Struct, kw_only=True):
    """A device's (or the host's) ledger at one instant; `sum(row.bytes) == total`.

    Attributes:
        device: `cuda:N` or `host`.
        total: the measured figure that the rows sum to (device used, or resident set), in bytes.
        source: where `total` was read (`cudaMemGetInfo`, `/proc/self/smaps`).
        rows: the rows.
        parameters: elements of the parameters that this process holds; None when no census was taken or no
            parameter is known.
        step: completed optimizer steps at that instant; None outside of a watched run.
    """

    device: str
    total: Whole
    source: str
    rows: list[LedgerRow]
    parameters: Whole | None = None
    step: Whole | None = None

    def per_parameter(self, row: LedgerRow) -> float | None:
        """Bytes of a row per parameter; None without a model."""
        return row.bytes / self.parameters if self.parameters else None
