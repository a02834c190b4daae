"""The instant of the peak by owner, module, line and phase."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from memtriage.model.prediction import EARLIER, PeakRow
from memtriage.prediction.lifetimes import FREE
from memtriage.prediction.owners import ACTIVATION, ROUNDING, TEMPORARY, owned_at
from memtriage.prediction.trace import Trace

_OPERATOR: Final = "::"
"""In the names of operators; libraries that keep a workspace (`cublas`) keep it for all modules."""
_POSITION: Final = re.compile(r"\.?(?<![^.])\d+(?![^.])")


def folded(path: str) -> str:
    """A module's path with the positions in lists folded.

    >>> folded("model.layers.11.mlp.experts.3"), folded("0.weight2"), folded("(GPT2)")
    ('model.layers[*].mlp.experts[*]', '[*].weight2', '(GPT2)')
    """
    return _POSITION.sub("[*]", path)


@dataclass(slots=True)
class _Sum:
    bytes: int = 0
    blocks: int = 0
    operators: Counter[str] = field(default_factory=Counter)


def peak_table(trace: Trace, allocated: int, event: int) -> list[PeakRow]:
    """Rows of an instant, largest first; they sum to its allocated bytes.

    Args:
        trace: one that was made with `explain`.
        allocated: the bytes.
        event: index of the event after which they are allocated.
    """
    sums: dict[tuple[str, str | None, str | None, str | None], _Sum] = {}
    starts = [marker for marker in trace.recording.markers if marker.event <= event]
    step = starts[-1].step
    first = next(marker.event for marker in starts if marker.step == step)
    earlier = {change.block for change in trace.recording.events[:first] if change.size != FREE}
    for number, owner in owned_at(trace, event):
        block = trace.recording.blocks[number]
        path = trace.modules.get(number) if _OPERATOR in block.op else None
        phase = block.phase
        if owner in (ACTIVATION, TEMPORARY) and number in earlier:
            phase += EARLIER
        key = owner, None if path is None else folded(path), trace.sites.get(number), phase
        total = sums.setdefault(key, _Sum())
        total.bytes += block.size
        total.blocks += 1
        total.operators[block.op] += block.size
    rows = [
        PeakRow(
            owner=owner,
            module=module,
            site=site,
            phase=phase,
            bytes=total.bytes,
            blocks=total.blocks,
            operator=total.operators.most_common(1)[0][0],
        )
        for (owner, module, site, phase), total in sums.items()
        if total.bytes
    ]
    rest = allocated - sum(row.bytes for row in rows)
    if rest:
        rows.append(PeakRow(owner=ROUNDING, module=None, bytes=rest, blocks=0, operator=None))
    return sorted(rows, key=lambda row: -row.bytes)
