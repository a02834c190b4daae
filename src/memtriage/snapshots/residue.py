"""Residue in a recording: what stays on the device after the model's parameters have left it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.diagnose.mechanisms import mechanism_of_known
from memtriage.model.findings import Finding
from memtriage.model.recording import OWNERS
from memtriage.model.units import MIB, size
from memtriage.playbook.mechanisms import MechanismText
from memtriage.playbook.snapshots import ADVICE
from memtriage.snapshots.known import known_bytes, known_words
from memtriage.snapshots.leaks import GrowingSites
from memtriage.snapshots.sites import alive_at
from memtriage.snapshots.view import DeviceView, Mask, known_site, listed


@dataclass(frozen=True, slots=True)
class RecordedResiduePolicy:
    """Thresholds for reporting residue.

    Attributes:
        gone: share of the parameters' peak below which they count as gone.
        arrived: share of it that must have been there before.
        share: residue, as a share of the parameters' peak, below which nothing is reported.
        floor_bytes: residue below which nothing is reported: a loss, a batch, the last outputs.
    """

    gone: float = 0.1
    arrived: float = 0.9
    share: float = 0.05
    floor_bytes: int = MIB


POLICY: Final = RecordedResiduePolicy()
_STAYS: Final = ("parameter", "cuBLAS workspace", "before the recording")
"""Owners that are no residue: workspaces live as long as the process, of old blocks nothing is known."""


@dataclass(frozen=True, slots=True)
class Residue:
    """What stays.

    Attributes:
        event: the last event of the phase without parameters, where least is allocated.
        lives: what is alive then and was before the parameters left.
        left: bytes of the parameters that left.
    """

    event: int
    lives: Mask
    left: int


def find_residue(
    view: DeviceView, growing: Sequence[GrowingSites] = (), policy: RecordedResiduePolicy = POLICY
) -> Residue | None:
    """Find the residue of the last phase without parameters; None where they never left, or nothing stays.

    Args:
        view: the device.
        growing: what grows from step to step. Growth that makes up most of what stays is reported as a leak
            and left out here.
        policy: thresholds.
    """
    valley = _valley(view, policy)
    if valley is None:
        return None
    begin, event, parameter_peak = valley
    lives = alive_at(view.replayed, event) & (view.replayed.born < begin) & ~view.owned_by(*_STAYS)
    for sites in growing:
        if 2 * view.total(sites.lives & lives) >= view.total(lives):
            lives &= ~sites.lives
    if view.total(lives) < max(policy.floor_bytes, policy.share * parameter_peak):
        return None
    return Residue(event, lives, parameter_peak)


def _valley(view: DeviceView, policy: RecordedResiduePolicy) -> tuple[int, int, int] | None:
    """Return first and emptiest event of the last phase without parameters, and their bytes before it."""
    replayed = view.replayed
    parameters = view.owners == OWNERS.index("parameter")
    change = np.zeros(len(view.trace), np.int64)
    born, died = parameters & (replayed.born >= 0), parameters & (replayed.died >= 0)
    np.add.at(change, replayed.born[born], replayed.size[born])
    np.subtract.at(change, replayed.died[died], replayed.size[died])
    level = np.cumsum(change) + view.total(parameters & ~born)
    if not len(level) or level.max() < policy.floor_bytes:
        return None
    peak = int(level.max())
    arrived = int(np.argmax(level >= policy.arrived * peak))
    gone = np.flatnonzero(level[arrived:] <= policy.gone * peak) + arrived
    if not len(gone):
        return None
    begin = int(gone[np.flatnonzero(np.diff(gone, prepend=-1) > 1)[-1]])
    end = int(gone[-1])
    if end == len(level) - 1:
        return begin, end, peak
    return begin, begin + int(np.argmin(replayed.timeline.allocated[begin : end + 1])), peak


def is_part_of(view: DeviceView, growth: GrowingSites, residue: Residue) -> bool:
    """Whether most of what grows is among what stays: then it is the same cause."""
    return 2 * view.total(growth.lives & residue.lives) >= view.total(growth.lives) > 0


def residue_finding(
    view: DeviceView, residue: Residue, growing: Sequence[GrowingSites], stranded: int
) -> Finding:
    """Make the finding of residue.

    Args:
        view: the device.
        residue: what stays.
        growing: the growths that are a part of it.
        stranded: free bytes that its blocks pin at the snapshot.
    """
    rows = view.by_site(residue.lives)
    total = view.total(residue.lives)
    known = known_bytes(view, residue.lives)
    per_step = sum(sites.per_step for sites in growing)
    at_end = residue.event == len(view.trace) - 1
    when = "at the snapshot" if at_end else f"at event {residue.event:,}"
    evidence = [
        f"{size(residue.left)} of parameters left the device; {size(total)} made before stay {when}",
        f"by site: {listed(rows)}",
    ]
    evidence += [
        f"it grows as well: {size(sites.per_step)} per step at {view.sites.names[sites.sites[0]]}"
        for sites in growing
    ]
    evidence += known_words(known)
    if stranded:
        evidence.append(
            f"its blocks pin segments with {size(stranded)} free, which `empty_cache()` cannot return"
        )
    mostly = known[0][0] if known and 2 * known[0][1] > total else None
    advice = ADVICE["residue"]
    cause = MechanismText(advice.why, advice.fix) if mostly is None else mechanism_of_known(mostly)
    return Finding(
        kind="residue",
        device=view.device,
        bytes=total,
        bytes_per_step=per_step or None,
        allocated_at=known_site(rows[0][0]),
        mechanism=cause.mechanism,
        fix=cause.fix,
        playbook=advice.entry,
        phase="after the parameters left",
        step=view.steps.count or None,
        evidence=evidence,
    )
