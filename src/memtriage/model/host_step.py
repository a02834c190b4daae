"""What one call did to host memory: the result of `memtriage.host_step`. Sizes in bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

from memtriage.model.paths import HolderPath, in_words
from memtriage.model.units import size


class HostDelta(msgspec.Struct, frozen=True, kw_only=True):
    """By how much one row of the host ledger changed.

    Attributes:
        row, owner: of the ledger.
        bytes: resident bytes after the call less those before it.
        new: of tensors that came into being and still live.
        first_touch: of tensors that were there before and whose pages came when they were first written
            (memory from calloc, `np.zeros`, `torch.empty`, a mapping).
        gone: of tensors that were there before and have been freed.
        moved: of tensors that another row counted before, e.g. because they had another owner; negative in
            the row that they left.
        holder_path: holder path of the tensor with most new or first-touched bytes.
    """

    row: str
    owner: str | None
    bytes: int
    new: int = 0
    first_touch: int = 0
    gone: int = 0
    moved: int = 0
    holder_path: HolderPath | None = None

    @property
    def holder(self) -> str | None:
        """The holder path as printed."""
        return None if self.holder_path is None else in_words(self.holder_path)


class HostStep(msgspec.Struct, frozen=True, kw_only=True):
    """One call's effect on the process's host memory; `sum(delta.bytes) == after - before`.

    Attributes:
        name: as given to `host_step`.
        before, after: resident set, all mappings counted.
        peak: highest resident set during the call.
        peak_source: `kernel` (its high-water mark, exact) or `sampled` (every few milliseconds, may miss it).
        parameters: elements of the parameters that the process holds; None without a model.
        deltas: the rows that changed, largest change first.
        retained: growth of the free memory that malloc keeps: part of `after`, and returned to the system by
            `memtriage.malloc_trim()`.
    """

    name: str
    before: int
    after: int
    peak: int
    peak_source: Literal["kernel", "sampled"]
    parameters: int | None
    deltas: tuple[HostDelta, ...]
    retained: int

    @property
    def added(self) -> int:
        """Growth of the resident bytes; negative if memory was returned."""
        return self.after - self.before

    @property
    def transient(self) -> int:
        """Bytes that were resident during the call only."""
        return max(self.peak - max(self.before, self.after), 0)

    def per_parameter(self, nbytes: int) -> float | None:
        """Bytes per parameter; None without a model."""
        return nbytes / self.parameters if self.parameters else None

    def __str__(self) -> str:
        """Lines as `optimizer.step added 800.0 MiB, 8.00 B/param`, then a line for each row that changed."""
        lines = [f"{self.name} added {self._words(self.added)}"]
        if self.transient:
            lines[0] += f"; {self._words(self.transient)} more during the call"
        for delta in self.deltas:
            owner = f" ({delta.owner})" if delta.owner else ""
            lines.append(f"  {self._words(delta.bytes)}  {delta.row}{owner}{_parts(delta)}")
        return "\n".join(lines)

    def _words(self, nbytes: int) -> str:
        per_parameter = self.per_parameter(nbytes)
        return size(nbytes) if per_parameter is None else f"{size(nbytes)}, {per_parameter:.2f} B/param"


def _parts(delta: HostDelta) -> str:
    changes = {"new": delta.new, "first touch": delta.first_touch, "gone": delta.gone, "moved": delta.moved}
    parts = [f"{name} {size(nbytes)}" for name, nbytes in changes.items() if nbytes]
    if delta.holder:
        parts.append(f"largest {delta.holder}")
    return f": {'; '.join(parts)}" if parts else ""
