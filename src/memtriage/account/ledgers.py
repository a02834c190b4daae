"""The ledgers of this process now: of every device that it uses, and of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from memtriage.account.gpu_ledger import gpu_ledger
from memtriage.account.host_reading import HostReading, read_host
from memtriage.account.workspaces import workspace_sizes
from memtriage.model.blocks import DriverUse, Segment
from memtriage.model.census import StorageRecord
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.observe import cuda, driver
from memtriage.process.stdlib import os


class DeviceReading(NamedTuple):
    """What the allocator and the driver say of a CUDA device at one instant."""

    device: int
    segments: list[Segment] | None
    use: DriverUse


def read_devices(script_root: str | None = None) -> list[DeviceReading]:
    """Read every CUDA device in use whose driver says what is in use."""
    read = ((device, driver.driver_use(device)) for device in cuda.devices())
    return [DeviceReading(at, cuda.segments(at, script_root), use) for at, use in read if use is not None]


def take_ledgers(
    storages: list[StorageRecord] | None,
    baselines: dict[int, int] | None = None,
    devices: Sequence[DeviceReading] | None = None,
    on_host: HostReading | None = None,
    parameters: int | None = None,
) -> list[Ledger]:
    """Return a closed ledger for each CUDA device in use, and one for the host.

    Args:
        storages: from a census now; None if none was taken (then there are no owners).
        baselines: bytes outside the allocator when a device was first seen, by CUDA index.
        devices: as `read_devices` returned them; None to read them now.
        on_host: the host's counters, read before the census. None to read them now: then the census's own
            memory counts as the program's.
        parameters: elements of the parameters, as counted by the census.
    """
    ledgers = []
    for device, segments, use in read_devices() if devices is None else devices:
        name = f"cuda:{device}"
        on_device = None if storages is None else [record for record in storages if record.device == name]
        workspaces = workspace_sizes(
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("CUBLASLT_WORKSPACE_SIZE")
        )
        baseline = (baselines or {}).get(device)
        ledgers.append(gpu_ledger(name, segments, on_device, use, baseline, workspaces=workspaces))
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
