"""Reserved far above the peak of allocated, and what other settings would have reserved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.trace_columns import last_events
from memtriage.allocator.what_if import WhatIfOutcome, alternatives, what_if
from memtriage.model.findings import Finding
from memtriage.model.units import MIB, count, size
from memtriage.playbook.snapshots import ADVICE, SnapshotCause
from memtriage.snapshots.view import DeviceView

EXPANDABLE: Final = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class SurplusPolicy:
    """Thresholds for reporting reserved memory that allocations never filled.

    Attributes:
        floor_bytes: fewest bytes between the peaks of reserved and of allocated.
        share: part of the peak of allocated that they must be: a cache needs some room in any run.
        helps: part of the surplus that a setting must save to be advised.
        events: events, the last ones, that are replayed under other settings. Each costs microseconds.
    """

    floor_bytes: int = 1024 * MIB
    share: float = 0.25
    helps: float = 0.5
    events: int = 60_000


POLICY: Final = SurplusPolicy()


@dataclass(frozen=True, slots=True)
class Trial:
    """The last events of a recording under several settings, each from an empty cache.

    Attributes:
        events: how many.
        steps: training steps that end within them.
        same: what came of the recorded settings.
        others: what came of the alternatives, by their text.
    """

    events: int
    steps: int
    same: WhatIfOutcome
    others: dict[str, WhatIfOutcome]


def surplus(view: DeviceView, policy: SurplusPolicy = POLICY) -> int:
    """Return the bytes by which reserved memory exceeds the peak of allocated; 0 where that is ordinary.

    Reserved at the snapshot: what has been given back before it is no surplus.
    """
    if not len(view.trace) or view.ooms:
        return 0
    allocated, _ = _peaks(view)
    above = view.end.reserved - allocated
    return above if above >= max(policy.floor_bytes, policy.share * allocated) else 0


def tried(view: DeviceView, settings: AllocatorSettings, policy: SurplusPolicy = POLICY) -> Trial:
    """Replay the last events of a device under its own settings and under alternatives.

    Args:
        view: the device.
        settings: those that it was recorded with.
        policy: thresholds.
    """
    trace = last_events(view.trace, policy.events)
    first = len(view.trace) - len(trace)

    def outcome(other: AllocatorSettings) -> WhatIfOutcome:
        return what_if(trace, view.segments, settings, other, from_empty_cache=True)

    return Trial(
        events=len(trace),
        steps=sum(end > first for end in view.steps.ends),
        same=outcome(settings),
        others={name: outcome(other) for name, other in alternatives(settings).items()},
    )


def surplus_finding(view: DeviceView, trial: Trial, policy: SurplusPolicy = POLICY) -> Finding:
    """Make the finding of a surplus.

    Args:
        view: the device.
        trial: its last events under other settings.
        policy: thresholds.
    """
    allocated, reserved = _peaks(view)
    best = _best(trial, policy)
    cause: SnapshotCause = "surplus in segments" if best else "surplus of the past"
    advice = ADVICE[cause]
    return Finding(
        kind="fragmentation",
        device=view.device,
        bytes=reserved - allocated,
        mechanism=advice.why,
        fix=advice.fix.format(setting=best),
        playbook=advice.entry,
        step=view.steps.count or None,
        evidence=[
            *surplus_lines(view, trial),
            f"at the snapshot {size(view.end.releasable)} is in wholly free segments, and "
            f"{size(view.end.stranded)} is stranded",
        ],
    )


def surplus_lines(view: DeviceView, trial: Trial) -> list[str]:
    """Return the peaks, and what each setting reserved at most, as evidence."""
    allocated, reserved = _peaks(view)
    whole = trial.events == len(view.trace)
    steps = f" ({count(trial.steps, 'step')})" if trial.steps else ""
    part = "the recording" if whole else f"its last {trial.events:,} events{steps}"
    outcomes = [("the recorded settings", trial.same), *trial.others.items()]
    return [
        f"at most {size(allocated)} allocated, but {size(reserved)} reserved",
        f"{part} replayed from an empty cache, most reserved: "
        + ", ".join(f"{name} {_reserved(outcome)}" for name, outcome in outcomes),
        f"compaction could not go below {size(trial.same.peak_allocated)}, the most allocated in that replay",
        *([] if whole else ["`memtriage snapshot --what-if` replays all events"]),
    ]


def _reserved(outcome: WhatIfOutcome) -> str:
    return size(outcome.peak_reserved)


def _best(trial: Trial, policy: SurplusPolicy) -> str | None:
    """Return the setting that reserved least, where it saves enough of what the recorded ones waste."""
    if not trial.others:
        return None
    name, outcome = min(trial.others.items(), key=lambda other: other[1].peak_reserved)
    wasted = trial.same.peak_reserved - trial.same.peak_allocated
    saved = trial.same.peak_reserved - outcome.peak_reserved
    reproduced = wasted >= policy.share * trial.same.peak_allocated
    return name if reproduced and saved >= policy.helps * wasted else None


def _peaks(view: DeviceView) -> tuple[int, int]:
    timeline, start = view.replayed.timeline, view.replayed.start
    return (
        max(int(timeline.allocated.max()), start[0]),
        max(int(timeline.reserved.max()), start[1]),
    )
