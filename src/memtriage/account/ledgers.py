"""The ledgers of this process at this instant: every device it uses, and the host."""

from __future__ import annotations

import os

from memtriage.account.gpu_ledger import gpu_ledger, workspace_sizes
from memtriage.account.host_ledger import host_ledger
from memtriage.model.census import StorageRecord
from memtriage.model.ledger import Ledger
from memtriage.observe import cuda, driver, host, malloc


def take_ledgers(
    storages: list[StorageRecord] | None,
    baselines: dict[int, int] | None = None,
    script_root: str | None = None,
) -> list[Ledger]:
    """A closed ledger for each CUDA device in use, and one for the host.

    Args:
        storages: as a census of this instant found them; None when none was taken (no owners then).
        baselines: by CUDA index, what lay outside the allocator when the device was first seen.
        script_root: folder of the user's script, for allocation sites.
    """
    ledgers = []
    for device in cuda.devices():
        use = driver.driver_use(device)
        if use is None:
            continue
        name = f"cuda:{device}"
        mine = None if storages is None else [record for record in storages if record.device == name]
        workspaces = workspace_sizes(
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("CUBLASLT_WORKSPACE_SIZE")
        )
        ledgers.append(
            gpu_ledger(
                name,
                cuda.segments(device, script_root),
                mine,
                use,
                (baselines or {}).get(device),
                workspaces=workspaces,
            )
        )
    classes = host.memory_classes()
    if classes is not None:
        on_host = [record for record in storages or [] if record.device == "cpu"]
        ledgers.append(host_ledger(on_host, classes, malloc.malloc_info(), host.pinned(), host.resident))
    return ledgers
