"""The instant of the peak by owner and module."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from memtriage.model.prediction import PeakRow
from memtriage.prediction.owners import ROUNDING, owned_at
from memtriage.prediction.simulate import StepCounters
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


def peak_table(trace: Trace, counters: StepCounters) -> list[PeakRow]:
    """Rows of the peak, largest first; they sum to its allocated bytes.

    Args:
        trace: one that was made with `explain`.
        counters: of the step whose peak it is.
    """
    sums: dict[tuple[str, str | None], _Sum] = {}
    for number, owner in owned_at(trace, counters.peak_event):
        block = trace.recording.blocks[number]
        path = trace.modules.get(number) if _OPERATOR in block.op else None
        total = sums.setdefault((owner, None if path is None else folded(path)), _Sum())
        total.bytes += block.size
        total.blocks += 1
        total.operators[block.op] += block.size
    rows = [
        PeakRow(
            owner=owner,
            module=module,
            bytes=total.bytes,
            blocks=total.blocks,
            operator=total.operators.most_common(1)[0][0],
        )
        for (owner, module), total in sums.items()
        if total.bytes
    ]
    rest = counters.peak_allocated - sum(row.bytes for row in rows)
    if rest:
        rows.append(PeakRow(owner=ROUNDING, module=None, bytes=rest, blocks=0, operator=None))
    return sorted(rows, key=lambda row: -row.bytes)
