"""The ledgers of this process now: of every device that it uses, and of the host."""

from __future__ import annotations

from typing import Final

import msgspec

from memtriage.account.gpu_ledger import gpu_ledger
from memtriage.account.host_reading import HostReading, read_host
from memtriage.account.workspaces import workspace_sizes
from memtriage.model.census import StorageRecord
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.observe import cuda, driver
from memtriage.process.stdlib import os


def take_ledgers(
    storages: list[StorageRecord] | None,
    baselines: dict[int, int] | None = None,
    script_root: str | None = None,
    on_host: HostReading | None = None,
    parameters: int | None = None,
) -> list[Ledger]:
    """Return a closed ledger for each CUDA device in use, and one for the host.

    Args:
        storages: from a census now; None if none was taken (then there are no owners).
        baselines: bytes outside the allocator when a device was first seen, by CUDA index.
        script_root: folder of the user's script, for allocation sites.
        on_host: the host's counters, read before the census. None to read them now: then the census's own
            memory counts as the program's.
        parameters: elements of the parameters, as counted by the census.
    """
    ledgers = []
    for device in cuda.devices():
        use = driver.driver_use(device)
        if use is None:
            continue
        name = f"cuda:{device}"
        on_device = None if storages is None else [record for record in storages if record.device == name]
        workspaces = workspace_sizes(
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("CUBLASLT_WORKSPACE_SIZE")
        )
        ledgers.append(
            gpu_ledger(
                name,
                cuda.segments(device, script_root),
                on_device,
                use,
                (baselines or {}).get(device),
                workspaces=workspaces,
            )
        )
    on_host = on_host or read_host()
    if on_host is not None:
        on_device = None if storages is None else [record for record in storages if record.device == "cpu"]
        ledgers.append(on_host.ledger(on_device))
    for ledger in ledgers:
        ledger.parameters = parameters or None
    if on_host is not None and (parameters or 0) >= _LEAST_PARAMETERS:
        ledgers[-1].rows = [_per_parameter(ledgers[-1], row) for row in ledgers[-1].rows]
    return ledgers


_LEAST_PARAMETERS: Final = 1_000_000
"""For a smaller model, libraries (some 300 MB) dominate, and bytes per parameter mean nothing."""
_LEAST_SHOWN: Final = 0.01


def _per_parameter(ledger: Ledger, row: LedgerRow) -> LedgerRow:
    """Return the row with its bytes per parameter before its detail."""
    per_parameter = ledger.per_parameter(row)
    if per_parameter is None or abs(per_parameter) < _LEAST_SHOWN:
        return row
    detail = f"{per_parameter:.2f} B/param" + (f"; {row.detail}" if row.detail else "")
    return msgspec.structs.replace(row, detail=detail)
