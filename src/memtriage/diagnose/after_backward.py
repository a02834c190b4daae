"""What contexts of custom autograd Functions keep after their backward has run. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memtriage.diagnose.residue import POLICY
from memtriage.model.census import StorageRecord
from memtriage.model.findings import Finding
from memtriage.playbook.mechanisms import MECHANISMS

ENTRY: Final = "te.tensor_objects"
"""The entry of the catalogue of known holders for such contexts (TransformerEngine #1935)."""


def left_after_backward(storages: Iterable[StorageRecord], step: int) -> list[Finding]:
    """Return a finding for each device with more of it than the policy's floor: it is always waste.

    Args:
        storages: of a census.
        step: completed steps.
    """
    kept: dict[str, list[StorageRecord]] = {}
    for storage in storages:
        if storage.known == ENTRY:
            kept.setdefault(storage.device, []).append(storage)
    return [
        _finding(device, records, step)
        for device, records in kept.items()
        if sum(record.nbytes for record in records) >= POLICY.floor
    ]


def _finding(device: str, records: list[StorageRecord], step: int) -> Finding:
    text = MECHANISMS["context after backward"]
    return Finding(
        kind="residue",
        device=device,
        bytes=sum(record.nbytes for record in records),
        holder_path=max(records, key=lambda record: record.nbytes).path,
        mechanism=text.mechanism,
        fix=text.fix,
        playbook="M19",
        phase="after backward",
        step=step,
        evidence=[f"{len(records):,} storages on {device} are kept by contexts whose backward has finished"],
    )
