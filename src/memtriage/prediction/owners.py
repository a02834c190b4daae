"""Whose the bytes of the peak instant are: by owner, and by owner, module, line and phase."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from memtriage.model.prediction import EARLIER, PeakRow
from memtriage.prediction.lifetimes import FREE, AllocationTrace
from memtriage.prediction.simulate import StepCounters, phase_at
from memtriage.prediction.trace import Trace

ROUNDING: Final = "rounding"
ACTIVATION: Final = "activation"
TEMPORARY: Final = "temporary"
KEPT: Final = "kept"
_OPERATOR: Final = "::"
"""In the names of operators; libraries that keep a workspace (`cublas`) keep it for all modules."""
_POSITION: Final = re.compile(r"\.?(?<![^.])\d+(?![^.])")


def owners_at(trace: Trace, counters: StepCounters) -> dict[str, int]:
    """Bytes by owner right after the event of the peak, largest first; sums to the allocated bytes."""
    bytes_by_owner: dict[str, int] = {}
    for number, owner in owned_at(trace, counters.peak_event):
        bytes_by_owner[owner] = bytes_by_owner.get(owner, 0) + trace.recording.blocks[number].size
    rest = counters.peak_allocated - sum(bytes_by_owner.values())
    if rest:
        bytes_by_owner[ROUNDING] = rest
    return dict(sorted(bytes_by_owner.items(), key=lambda item: -item[1]))


def owned_at(trace: Trace, event: int) -> list[tuple[int, str]]:
    """The blocks that are live right after an event, each with its owner."""
    recording = trace.recording
    starts = [marker.event for marker in recording.markers if marker.phase == "backward"]
    if phase_at(recording, event) == "forward":
        begins = min((start for start in starts if start > event), default=event + 1)
    else:
        begins = max((start for start in starts if start <= event), default=event + 1)
    needed = {
        number for number in _live_at(recording, begins - 1) if recording.blocks[number].phase == "forward"
    }
    return [
        (
            number,
            trace.owners.get(number) or recording.blocks[number].owner or _other(recording, number, needed),
        )
        for number in _live_at(recording, event)
    ]


def _other(recording: AllocationTrace, number: int, needed: set[int]) -> str:
    """Made in forward for backward, or made again by a checkpoint within backward; kept since the program
    built its model; else of the moment."""
    block = recording.blocks[number]
    if block.phase == "build":
        return KEPT
    return ACTIVATION if number in needed or (block.phase == "backward" and block.recorded) else TEMPORARY


def _live_at(recording: AllocationTrace, event: int) -> list[int]:
    live: dict[int, None] = {}
    for change in recording.events[: event + 1]:
        if change.size == FREE:
            del live[change.block]
        else:
            live[change.block] = None
    return list(live)


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
