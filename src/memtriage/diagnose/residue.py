"""Residue: what a census finds on the device at the end of a phase although it should be gone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from memtriage.catalogue.catalogue import holders
from memtriage.diagnose.mechanisms import mechanism_of_known
from memtriage.model.census import Owner, StorageRecord, known_path
from memtriage.model.findings import Finding
from memtriage.model.paths import HolderPath, in_words
from memtriage.model.units import MIB, size
from memtriage.playbook.mechanisms import MechanismText
from memtriage.playbook.residue import ADVICE, ENTRY, ResidueCause


@dataclass(frozen=True, slots=True)
class ResiduePolicy:
    """Thresholds for reporting residue.

    Attributes:
        floor: bytes on a device below which nothing is reported: a loss, a batch, the last outputs. Also the
            least rise of the allocator's counter for a census.
        share: a holder with less than this part of the residue has no finding. Also the part of the bytes at
            the last census by which more must be allocated for another one.
        findings: most findings per device.
    """

    floor: int = 4 * MIB
    share: float = 0.05
    findings: int = 5

    def __post_init__(self) -> None:
        if self.floor < 0 or self.findings < 1 or not 0 <= self.share <= 1:
            raise ValueError(f"{self}: floor is at least 0 bytes, findings at least 1, share between 0 and 1")


POLICY: Final = ResiduePolicy()

KEPT_OWNERS: Final[frozenset[Owner]] = frozenset(("parameter", "gradient", "optimizer state", "buffer"))
"""What a model keeps between phases. It is not residue; when parked, it is not on the device."""


@dataclass(frozen=True, slots=True)
class ResidueRow:
    """What one holder keeps. Sizes in bytes.

    Attributes:
        device: `cuda:N` or `cpu`.
        owner: what it is.
        path: the shortest holder path; None if unknown.
        known: name of its entry in the catalogue of known holders; None if it has none.
        nbytes: bytes of its storages.
        storages: how many.
    """

    device: str
    owner: Owner
    path: HolderPath | None
    known: str | None
    nbytes: int
    storages: int

    @property
    def name(self) -> str:
        """Entry and holder path, as far as known."""
        path = known_path(self.known, self.path)
        return self.owner if path is None else in_words(path)


def residue_rows(
    storages: Iterable[StorageRecord],
    generic: Mapping[tuple[str, int], str],
    *,
    devices: AbstractSet[str],
    variables: bool,
    ours: AbstractSet[int] = frozenset(),
) -> list[ResidueRow]:
    """Return the residue in a census, by device and holder, largest first.

    Args:
        storages: of the census.
        generic: names of the catalogue's generic entries, by device and address of the storages that they
            keep. The census itself has the entries of libraries.
        devices: the devices to look at.
        variables: whether tensors that the program itself holds count. They do if everything should have left
            the device; if a phase only ends, its results stay on purpose. What an entry holds always counts.
        ours: addresses of memory that memtriage itself keeps.
    """
    sums: dict[tuple[str, Owner, HolderPath | None, str | None], tuple[int, int]] = {}
    for storage in storages:
        if storage.owner in KEPT_OWNERS or storage.device not in devices or storage.address in ours:
            continue
        known = storage.known or generic.get((storage.device, storage.address))
        if storage.owner == "variable" and not variables and known is None:
            continue
        key = (storage.device, storage.owner, storage.path, known)
        nbytes, count = sums.get(key, (0, 0))
        sums[key] = (nbytes + storage.nbytes, count + 1)
    rows = [
        ResidueRow(device=device, owner=owner, path=path, known=known, nbytes=nbytes, storages=count)
        for (device, owner, path, known), (nbytes, count) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.nbytes)


def residue_findings(
    rows: Sequence[ResidueRow], phase: str, step: int | None, policy: ResiduePolicy = POLICY
) -> list[Finding]:
    """Return findings for the holders that keep most of it; none for a device below the floor."""
    findings: list[Finding] = []
    for device in dict.fromkeys(row.device for row in rows):
        of_device = [row for row in rows if row.device == device]
        total = sum(row.nbytes for row in of_device)
        if total < policy.floor:
            continue
        large = [row for row in of_device if row.nbytes >= policy.share * total][: policy.findings]
        findings += [_finding(row, total, phase, step) for row in large]
    return findings


def _finding(row: ResidueRow, total: int, phase: str, step: int | None) -> Finding:
    cause = _cause(row)
    return Finding(
        kind="residue",
        device=row.device,
        bytes=row.nbytes,
        holder_path=known_path(row.known, row.path),
        mechanism=cause.mechanism,
        fix=cause.fix,
        playbook=ENTRY,
        phase=phase,
        step=step,
        evidence=[
            f"after phase {phase!r} {size(total)} stay on {row.device} in addition to parameters, gradients, "
            f"optimizer state and buffers; {size(row.nbytes)} of it in {row.storages:,} storages here"
        ],
    )


def _cause(row: ResidueRow) -> MechanismText:
    entry = next((holder for holder in holders(generic=False) if holder.name == row.known), None)
    if entry is not None:
        return mechanism_of_known(entry)
    return ADVICE[_CAUSES.get(row.owner, "program")].filled({"owner": row.owner})


_CAUSES: Final[Mapping[Owner, ResidueCause]] = {
    "saved for backward": "autograd graph",
    "autograd context": "autograd graph",
    "garbage": "garbage",
    "communication buffer": "communication buffer",
}
