"""What one execution of a notebook's cell did to memory. Numbers and text only: nothing is kept alive.

Holders have a notebook's names: variables their own, `Out[*]` for outputs that IPython keeps, `last
traceback` for the variables of functions that an error ended.
"""

from __future__ import annotations

import msgspec

from memtriage.model.ledger import Ledger
from memtriage.model.paths import HolderPath, in_words
from memtriage.model.report import RunReport


class DeviceUse(msgspec.Struct, kw_only=True):
    """Bytes in live tensors on a device before and after a cell, and the most that was in use.

    Attributes:
        device: `cuda:N` or `cpu`.
        before, after: bytes in live tensors, as censuses found them.
        peak: the most that the process had in use meanwhile: of the CUDA allocator where it rose above what
            it had ever been, for `cpu` the resident set; None where that is unknown.
        reserved: what the CUDA allocator has of the device now; None for `cpu`.
    """

    device: str
    before: int
    after: int
    peak: int | None = None
    reserved: int | None = None


class HolderChange(msgspec.Struct, kw_only=True):
    """One holder of tensors, and how many bytes more (or less) it has than before.

    Attributes:
        device: `cuda:N` or `cpu`.
        holder: its path as printed; made from `holder_path` where that is given.
        holder_path: its path.
        bytes: the difference; below zero where memory was freed.
        count: storages more or less.
        owner: what most of its bytes are.
    """

    device: str
    holder: str = ""
    holder_path: HolderPath = ()
    bytes: int
    count: int
    owner: str

    def __post_init__(self) -> None:
        self.holder = self.holder or in_words(self.holder_path)


class Freed(msgspec.Struct, kw_only=True):
    """What was freed. `bytes` by device, as censuses before and after found them; `frames` emptied."""

    bytes: dict[str, int]
    frames: int
    holders: list[HolderChange] = msgspec.field(default_factory=list)


class CellReport(msgspec.Struct, kw_only=True):
    """One execution of a cell.

    Attributes:
        label: the cell as the notebook names it, `In[5]`.
        seconds: how long it took, without memtriage's own work.
        devices: tensors before and after, by device.
        came, went: holders that have more, or less, than before; largest first.
        holders: what holds memory now, largest first, after an out-of-memory error.
        outputs: bytes that `Out` alone keeps, by device.
        traceback: bytes that the error's traceback keeps, by device; empty without an error.
        freed: what was freed of it; None when nothing was.
        notes: sentences.
        run_report: the watch's report; None where the process was watched already.
        runs_out_in: for each of its findings the steps until memory is used up, None where unknown.
    """

    label: str
    seconds: float
    devices: list[DeviceUse]
    came: list[HolderChange]
    went: list[HolderChange]
    holders: list[HolderChange] = msgspec.field(default_factory=list)
    outputs: dict[str, int] = msgspec.field(default_factory=dict)
    traceback: dict[str, int] = msgspec.field(default_factory=dict)
    freed: Freed | None = None
    notes: list[str] = msgspec.field(default_factory=list)
    run_report: RunReport | None = None
    runs_out_in: list[int | None] = msgspec.field(default_factory=list)


class MemoryNow(msgspec.Struct, kw_only=True):
    """What holds memory at this instant: the ledgers, and the holders of tensors, largest first.

    Attributes:
        ledgers: of each CUDA device in use, and of the host.
        holders: holders of tensors.
        more: bytes by device that holders left out of `holders` have.
        outputs: bytes that `Out` alone keeps, by device.
        traceback: bytes that the last traceback keeps, by device.
    """

    ledgers: list[Ledger]
    holders: list[HolderChange]
    more: dict[str, int]
    outputs: dict[str, int] = msgspec.field(default_factory=dict)
    traceback: dict[str, int] = msgspec.field(default_factory=dict)
