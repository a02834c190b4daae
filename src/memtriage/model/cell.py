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


class Rebinding(msgspec.Struct, kw_only=True):
    """A variable that got a new value in the cell while its old one was alive. Sizes in bytes.

    Attributes:
        name: the variable.
        device: where its tensors are.
        old, new: bytes of the old value's tensors and of the new one's.
        extra: bytes in use, above those before the cell, at the instant when the old value went; None when
            it is still alive.
        still_held_by: what keeps the old value alive now, as printed; empty when it went.
        still_held_by_paths: its paths.
    """

    name: str
    device: str
    old: int
    new: int
    extra: int | None = None
    still_held_by: list[str] = msgspec.field(default_factory=list)
    still_held_by_paths: list[HolderPath] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.still_held_by = self.still_held_by or [in_words(path) for path in self.still_held_by_paths]


class OutputHold(msgspec.Struct, kw_only=True):
    """An output that IPython keeps, `Out[number]`: bytes of tensors that nothing else holds, by device."""

    number: int
    bytes: dict[str, int]
    kind: str


class Freed(msgspec.Struct, kw_only=True):
    """What was freed. `bytes` by device, as censuses before and after found them; `frames` emptied."""

    bytes: dict[str, int]
    frames: int
    holders: list[HolderChange] = msgspec.field(default_factory=list)
    outputs: list[int] = msgspec.field(default_factory=list)


class CellReport(msgspec.Struct, kw_only=True):
    """One execution of a cell.

    Attributes:
        label: the cell as the notebook names it, `In[5]`.
        run: how often it has run under the magic, this time included.
        seconds: how long it took, without memtriage's own work.
        devices: tensors before and after, by device.
        came, went: holders that have more, or less, than before; largest first.
        holders: what holds memory now, largest first, where it was asked for.
        rebindings: variables whose old and new values were alive at once.
        outputs: what `Out` alone holds.
        traceback: bytes that the error's traceback keeps, by device; empty without an error.
        freed: what was freed of it; None when nothing was.
        notes: sentences.
        run_report: the watch's report; None where the process was watched already.
        runs_out_in: for each of its findings the steps until memory is used up, None where unknown.
    """

    label: str
    run: int
    seconds: float
    devices: list[DeviceUse]
    came: list[HolderChange]
    went: list[HolderChange]
    holders: list[HolderChange] = msgspec.field(default_factory=list)
    rebindings: list[Rebinding] = msgspec.field(default_factory=list)
    outputs: list[OutputHold] = msgspec.field(default_factory=list)
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
        outputs: what `Out` alone holds.
        traceback: bytes that the last traceback keeps, by device.
    """

    ledgers: list[Ledger]
    holders: list[HolderChange]
    more: dict[str, int]
    outputs: list[OutputHold] = msgspec.field(default_factory=list)
    traceback: dict[str, int] = msgspec.field(default_factory=dict)
