"""Leaks in a recording: sites that rise from step to step, and what stays when a model has left. Pure.

A recording knows every block, so it needs fewer steps than a counter does: the floor must rise from each
third of the steps to the next, and go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from memtriage.diagnose.growth.estimate import FEWEST, floor_rise
from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.diagnose.mechanisms import mechanism_of_known
from memtriage.model.findings import Finding
from memtriage.model.recording import OWNERS
from memtriage.model.units import MIB, size
from memtriage.playbook.snapshots import SnapshotCause
from memtriage.snapshots.owners import SiteSeries, alive_at
from memtriage.snapshots.steps import BACKWARD, FORWARD
from memtriage.snapshots.view import DeviceView, Mask, known_bytes, known_site, known_words, listed, way_to

FEWEST_STEPS: Final = 4
MANY_STEPS: Final = WARM_UP + FEWEST
"""From so many steps on floors are compared; with fewer, bytes and blocks must rise at every step but the
first."""
_FLOOR: Final = 1024
"""Bytes that a cause must add per step."""
_GOES_ON: Final = 0.3
"""Part of the rate that the last third of the steps must still show: a cache that filled up and an
optimizer's late state have stopped."""
_SITES: Final = 6
"""Sites that the evidence lists."""
NO_LEAK: Final = ("parameter", "optimizer state", "cuBLAS workspace", "before the recording")
"""Owners that share a site with what grows, but as a rule do not grow."""


def growing_sites(series: SiteSeries) -> dict[int, float]:
    """Return the sites that grow, fastest first, with bytes per step as an exact ratio of what was seen."""
    steps = series.steps.tolist()
    if len(steps) < FEWEST_STEPS:
        return {}
    rates: dict[int, float] = {}
    for site in (series.bytes[:, -1] > series.bytes[:, 0]).nonzero()[0].tolist():
        if rate := _rate(steps, series.bytes[site].tolist(), series.blocks[site].tolist()):
            rates[site] = rate
    return dict(sorted(rates.items(), key=lambda row: (-row[1], row[0])))


def _rate(steps: Sequence[int], values: Sequence[int], blocks: Sequence[int]) -> float | None:
    if len(steps) < MANY_STEPS:
        rising = all(after > before for each in (values, blocks) for before, after in pairwise(each[1:]))
        return (values[-1] - values[1]) / (steps[-1] - steps[1]) if rising else None
    third = len(steps) // 3
    more = blocks[-1] > blocks[WARM_UP]
    rises = all(after >= before for before, after in pairwise(values[WARM_UP if more else 1 :]))
    if not rises and not more:
        # as many blocks as before, now larger and now smaller: a batch, an output
        return None
    rate = floor_rise(list(zip(steps, values, strict=True))[WARM_UP:])
    if not rate or values[-1] - values[-third] < _GOES_ON * rate * (steps[-1] - steps[-third]):
        return None
    # where nothing falls back, the floors are not needed to see through it
    return (values[-1] - values[WARM_UP]) / (steps[-1] - steps[WARM_UP]) if rises else rate


@dataclass(frozen=True, slots=True, eq=False)
class GrowingSites:
    """Sites that grow together, for one cause.

    Attributes:
        rates: bytes per step of each, fastest first.
        lives: the blocks that it keeps, at the snapshot.
        graph: they were made in forward or backward.
    """

    rates: Mapping[int, float]
    lives: Mask
    graph: bool

    @property
    def site(self) -> int:
        """The fastest one."""
        return next(iter(self.rates))

    @property
    def per_step(self) -> int:
        """Bytes a step."""
        return round(sum(self.rates.values()))


def growths(view: DeviceView, rates: Mapping[int, float]) -> list[GrowingSites]:
    """Join growing sites, which come with bytes per step, fastest first, into causes, the fastest first.

    What forward and backward allocated is one autograd graph, as far as frames can tell. The inputs and
    numbers that a graph keeps alive grow with it, and more slowly: they belong to it.
    """
    in_graph, kept = np.isin(view.phases(), (FORWARD, BACKWARD)), view.survived() > 0
    graph = [
        site
        for site in rates
        if 2 * view.total(kept & view.at_sites([site]) & in_graph) > view.total(kept & view.at_sites([site]))
    ]
    fastest = rates[graph[0]] if graph else 0.0
    dragged = [site for site in rates if site not in graph and rates[site] < fastest]
    alone = [site for site in rates if site not in graph and site not in dragged]
    causes = [_growth(view, rates, [site], graph=False) for site in alone]
    if graph:
        causes.append(_growth(view, rates, [site for site in rates if site not in alone], graph=True))
    # What is freed at the end is no leak.
    leaks = [each for each in causes if each.per_step >= _FLOOR and view.total(each.lives) >= each.per_step]
    return sorted(leaks, key=lambda cause: -cause.per_step)


def _growth(
    view: DeviceView, rates: Mapping[int, float], sites: Sequence[int], *, graph: bool
) -> GrowingSites:
    lives = view.alive() & view.at_sites(sites)
    for owner in NO_LEAK:
        lives &= ~_settled(view, lives & view.owned_by(owner))
    return GrowingSites({site: rates[site] for site in sites}, lives, graph)


def _settled(view: DeviceView, lives: Mask) -> Mask:
    """Return what training needs and does not grow: all of it, unless more of it comes late."""
    born, ends = view.replayed.born, view.steps.ends
    grows = bool((lives & (born > ends[len(ends) // 2])).any())
    return lives & (born < ends[0]) if grows else lives


def leak_finding(view: DeviceView, growth: GrowingSites) -> Finding:
    """Make the finding of one cause of growth."""
    at_site, name = view.at_sites([growth.site]), view.sites.names[growth.site]
    cause: SnapshotCause = "growth elsewhere"
    if growth.graph:
        kept, phases = at_site & (view.survived() > 0), view.phases()
        backward, forward = (view.total(kept & (phases == phase)) for phase in (BACKWARD, FORWARD))
        cause = "growth in backward" if backward > forward else "growth in forward"
    rates = [f"{view.sites.names[site]} {size(rate)}" for site, rate in growth.rates.items()]
    more = len(rates) - _SITES
    way = way_to(view, growth.lives & at_site)
    return view.finding(
        "leak",
        cause,
        [
            f"{size(growth.per_step)} more at the end of each step, over {view.steps.count} steps "
            f"(found by {view.steps.source})",
            f"by site, per step: {', '.join(rates[:_SITES])}" + (f", and {more} more" if more > 0 else ""),
            *([f"most of it is allocated by way of {way}"] if way else []),
            f"alive at the snapshot: {listed(view.by_site(growth.lives))}",
            "a recording has no holders: `memtriage run` names what keeps them",
        ],
        bytes=view.total(growth.lives),
        bytes_per_step=growth.per_step,
        allocated_at=known_site(name),
        phase=cause.removeprefix("growth in ") if growth.graph else None,
        step=view.steps.count,
    )


# Residue: what stays on the device after the model's parameters have left it

_GONE, _ARRIVED = 0.1, 0.9
"""Shares of the parameters' peak: below the one they count as gone, the other must have been there before."""
_RESIDUE_SHARE, _LEAST_RESIDUE = 0.05, MIB
"""Residue, as a share of the parameters' peak and in bytes, below which nothing is reported: a loss, a batch,
the last outputs."""
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


def find_residue(view: DeviceView, growing: Sequence[GrowingSites]) -> Residue | None:
    """Find the residue of the last phase without parameters; None where they never left, or nothing stays.

    Growth that makes up most of what stays is reported as a leak and left out here.
    """
    valley = _valley(view)
    if valley is None:
        return None
    begin, event, parameter_peak = valley
    lives = alive_at(view.replayed, event) & (view.replayed.born < begin) & ~view.owned_by(*_STAYS)
    for sites in growing:
        if 2 * view.total(sites.lives & lives) >= view.total(lives):
            lives &= ~sites.lives
    if view.total(lives) < max(_LEAST_RESIDUE, _RESIDUE_SHARE * parameter_peak):
        return None
    return Residue(event, lives, parameter_peak)


def _valley(view: DeviceView) -> tuple[int, int, int] | None:
    """Return first and emptiest event of the last phase without parameters, and their bytes before it."""
    replayed = view.replayed
    parameters = view.owners == OWNERS.index("parameter")
    change = np.zeros(len(view.trace), np.int64)
    born, died = parameters & (replayed.born >= 0), parameters & (replayed.died >= 0)
    np.add.at(change, replayed.born[born], replayed.size[born])
    np.subtract.at(change, replayed.died[died], replayed.size[died])
    level = np.cumsum(change) + view.total(parameters & ~born)
    if not len(level) or level.max() < _LEAST_RESIDUE:
        return None
    peak = int(level.max())
    arrived = int(np.argmax(level >= _ARRIVED * peak))
    gone = np.flatnonzero(level[arrived:] <= _GONE * peak) + arrived
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
    """Make the finding of residue, with the growths that are a part of it and the free bytes that it pins."""
    rows = view.by_site(residue.lives)
    total = view.total(residue.lives)
    known = known_bytes(view, residue.lives)
    per_step = sum(sites.per_step for sites in growing)
    when = f"at event {residue.event:,}" if residue.event < len(view.trace) - 1 else "at the snapshot"
    evidence = [
        f"{size(residue.left)} of parameters left the device; {size(total)} made before stay {when}",
        f"by site: {listed(rows)}",
    ]
    evidence += [
        f"it grows as well: {size(sites.per_step)} per step at {view.sites.names[sites.site]}"
        for sites in growing
    ]
    evidence += known_words(known)
    if stranded:
        evidence.append(
            f"its blocks pin segments with {size(stranded)} free, which `empty_cache()` cannot return"
        )
    mostly = known[0][0] if known and 2 * known[0][1] > total else None
    known_cause = None if mostly is None else mechanism_of_known(mostly)
    return view.finding(
        "residue",
        "residue",
        evidence,
        bytes=total,
        bytes_per_step=per_step or None,
        allocated_at=known_site(rows[0][0]),
        phase="after the parameters left",
        step=view.steps.count or None,
        **({"mechanism": known_cause.mechanism, "fix": known_cause.fix} if known_cause else {}),
    )
