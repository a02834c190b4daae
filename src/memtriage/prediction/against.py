"""A prediction compared with the record of a real run: at the same marks, and owner by owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark
from memtriage.model.prediction import Against, ComparedMark, ComparedOwner
from memtriage.prediction.lifetimes import Marker
from memtriage.prediction.owners import ACTIVATION, ROUNDING, owned_at
from memtriage.prediction.simulate import StepCounters, replay
from memtriage.prediction.trace import Trace
from memtriage.prediction.watch import Instant
from memtriage.store.locate import RecordError
from memtriage.store.reader import RankRecord, read_run

OTHER: Final = "other tensors"
CACHED: Final = "free in the cache"
OUTSIDE: Final = "outside the allocator"

_AS_PREDICTED: Final = {
    "saved for backward": ACTIVATION,
    "autograd context": ACTIVATION,
    "c++ only": "workspace",
}
"""Owners of a ledger that have another name in a prediction."""
_SAME: Final = frozenset(
    {"parameter", "gradient", "optimizer state", "buffer", ACTIVATION, "workspace", ROUNDING}
)
"""Owners that both have; the others are `OTHER`: which variable holds a tensor a trace does not ask."""
_OUTSIDE_ROWS: Final = frozenset({"context", OUTSIDE})
_CACHED_ROWS: Final = frozenset({"releasable", "stranded", "awaiting stream events"})
_REQUESTED: Final = "requested"
_WORDS: Final = {"backward": "backward", "step": "the optimizer's step"}


def read_device(directory: Path, rank: int) -> tuple[RankRecord, str]:
    """The record of a rank and the device that it used most.

    Raises:
        ValueError: there is no record, none of this rank, or none of a GPU.
    """
    try:
        run = read_run([directory])
    except RecordError as error:
        raise ValueError(str(error)) from error
    record = next((rank_record for rank_record in run.ranks if rank_record.number == rank), None)
    if record is None:
        raise ValueError(f"{directory} has no record of rank {rank}; expected one of the predicted rank")
    used: Counter[str] = Counter()
    for mark in record.marks:
        if mark.device.startswith("cuda") and mark.allocated is not None:
            used[mark.device] = max(used[mark.device], mark.allocated)
    if not used:
        raise ValueError(f"{directory} has no marks of a GPU; expected the record of a run on one")
    return record, used.most_common(1)[0][0]


def compare(trace: Trace, device_memory: int, outside: int, record: RankRecord, device: str) -> Against:
    """Compare a record with a trace.

    Args:
        device_memory: of the simulated allocator.
        outside: predicted bytes outside the allocator.
        record, device: what `read_device` found.
    """
    counters = _counters(trace, device_memory)
    notes = []
    marks = _marks([mark for mark in record.marks if mark.device == device], counters, trace.steps)
    if not marks:
        notes.append("the record has no marks of optimizer steps")
    elif marks[-1].step < trace.steps:
        notes.append(f"the record ends after step {marks[-1].step}")
    ledger = record.ledgers.get(device)
    if ledger is None or not counters:
        missing = f"the record has no ledger of {device}" if ledger is None else "the program made no marks"
        notes.append(f"{missing}: nothing to compare owner by owner")
        return Against(device=device, marks=marks, owners=[], instant=None, notes=notes)
    held = sum(row.bytes for row in ledger.rows if row.row in (_REQUESTED, ROUNDING))
    instant, nearest = min(counters, key=lambda counter: abs(counter[1].end_allocated - held))
    return Against(
        device=device,
        marks=marks,
        owners=_owners(trace, instant, nearest, ledger, outside),
        instant=f"end of {_WORDS[instant.name]} in step {instant.step + 1}",
        notes=notes,
    )


def _counters(trace: Trace, device_memory: int) -> list[tuple[Instant, StepCounters]]:
    """The allocator's counters at each instant. The replay takes them for the ends of its steps."""
    recording = trace.recording
    starts = [0, *(instant.event for instant in trace.instants)]
    markers = [Marker(event, "", step) for step, event in enumerate(starts)]
    cut = replace(recording, markers=markers)
    counted = replay(cut, trace.settings, device_memory, len(starts))
    return list(zip(trace.instants, counted, strict=False))


def _marks(marks: list[Mark], counters: list[tuple[Instant, StepCounters]], steps: int) -> list[ComparedMark]:
    """The last mark of each name in each predicted step; the last step is compared with the last recorded."""
    done = max((mark.step for mark in marks if mark.name == "step"), default=0)
    predicted: dict[tuple[str, int], StepCounters] = {
        (instant.name, instant.step + 1): counted for instant, counted in counters
    }
    compared = []
    for step in range(1, min(steps, done) + 1):
        recorded_step = done if step == steps else step
        for name, offset in (("backward", 1), ("step", 0)):
            # A mark within a step counts the steps before it.
            there = [mark for mark in marks if (mark.name, mark.step) == (name, recorded_step - offset)]
            counted = predicted.get((name, step))
            if there and counted is not None:
                compared.append(
                    ComparedMark(
                        name=name,
                        step=step,
                        recorded_step=recorded_step,
                        allocated=there[-1].allocated,
                        reserved=there[-1].reserved,
                        predicted_allocated=counted.end_allocated,
                        predicted_reserved=counted.peak_reserved,
                    )
                )
    return compared


def _owners(
    trace: Trace, instant: Instant, counters: StepCounters, ledger: Ledger, outside: int
) -> list[ComparedOwner]:
    blocks = trace.recording.blocks
    predicted = _summed((owner, blocks[number].size) for number, owner in owned_at(trace, instant.event - 1))
    predicted[ROUNDING] = counters.end_allocated - predicted.total()
    predicted[OUTSIDE] = outside
    predicted[CACHED] = counters.peak_reserved - counters.end_allocated
    recorded: Counter[str] = Counter()
    unknown = 0
    for row in ledger.rows:
        if row.row == _REQUESTED and row.owner is None:
            unknown += row.bytes
        elif row.row == _REQUESTED:
            recorded += _summed([(str(row.owner), row.bytes)])
        elif row.row == ROUNDING:
            recorded[ROUNDING] += row.bytes
        elif row.row in _CACHED_ROWS:
            recorded[CACHED] += row.bytes
        elif row.row in _OUTSIDE_ROWS:
            recorded[OUTSIDE] += row.bytes
    names = sorted({*predicted, *recorded}, key=lambda name: -max(predicted[name], recorded[name]))
    compared = [
        ComparedOwner(
            owner=name,
            recorded=None if unknown and name in _SAME - {ROUNDING} else recorded[name],
            predicted=predicted[name],
        )
        for name in names
        if predicted[name] or recorded[name]
    ]
    if unknown:
        compared.append(ComparedOwner(owner="owner not recorded", recorded=unknown, predicted=0))
    return compared


def _summed(parts: Iterable[tuple[str, int]]) -> Counter[str]:
    """Bytes by owner, in the words that a prediction and a ledger share."""
    bytes_by_owner: Counter[str] = Counter()
    for owner, count in parts:
        name = _AS_PREDICTED.get(owner, owner)
        bytes_by_owner[name if name in _SAME else OTHER] += count
    return bytes_by_owner
