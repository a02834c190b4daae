"""Leaks in a recording: sites whose live bytes rise from step to step, joined into causes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from memtriage.model.findings import Finding
from memtriage.model.units import size
from memtriage.playbook.snapshots import ADVICE, SnapshotCause
from memtriage.snapshots.growth import RECORDED_POLICY, RecordedGrowthPolicy, SiteGrowth
from memtriage.snapshots.stacks import BACKWARD, FORWARD
from memtriage.snapshots.view import DeviceView, Mask, known_site, listed, way_to

_SITES: Final = 6
"""Sites that the evidence lists."""
NO_LEAK: Final = ("parameter", "optimizer state", "cuBLAS workspace", "before the recording")
"""Owners that share a site with what grows, but as a rule do not grow."""


@dataclass(frozen=True, slots=True)
class GrowingSites:
    """Sites that grow together, for one cause.

    Attributes:
        sites: the sites, fastest first.
        rates: bytes per step of each.
        lives: the blocks that it keeps, at the snapshot.
        graph: they were made in forward or backward.
    """

    sites: tuple[int, ...]
    rates: tuple[float, ...]
    lives: Mask
    graph: bool

    @property
    def per_step(self) -> int:
        """Bytes a step."""
        return round(sum(self.rates))


def growths(
    view: DeviceView, sites: Sequence[SiteGrowth], policy: RecordedGrowthPolicy = RECORDED_POLICY
) -> list[GrowingSites]:
    """Join growing sites into causes, the fastest first.

    What forward and backward allocated is one autograd graph, as far as frames can tell. The inputs and
    numbers that a graph keeps alive grow with it, and more slowly: they belong to it.
    """
    phases = view.phases()
    graph: list[SiteGrowth] = []
    others: list[SiteGrowth] = []
    kept = view.survived() > 0
    for growth in sites:
        at_site = kept & view.at_sites([growth.site])
        inside = at_site & ((phases == FORWARD) | (phases == BACKWARD))
        (graph if 2 * view.total(inside) > view.total(at_site) else others).append(growth)
    fastest = max((growth.rate for growth in graph), default=0.0)
    dragged = [other for other in others if other.rate < fastest]
    groups = [graph + dragged] if graph else []
    groups += [[other] for other in others if other.rate >= fastest]
    causes = [_growth(view, group, is_graph=group[0] in graph) for group in groups]
    return sorted(
        # What is freed at the end is no leak.
        (
            cause
            for cause in causes
            if cause.per_step >= policy.floor_bytes and view.total(cause.lives) >= cause.per_step
        ),
        key=lambda cause: -cause.per_step,
    )


def _growth(view: DeviceView, group: Sequence[SiteGrowth], *, is_graph: bool) -> GrowingSites:
    ordered = sorted(group, key=lambda growth: -growth.rate)
    sites = tuple(growth.site for growth in ordered)
    lives = view.alive() & view.at_sites(sites)
    for owner in NO_LEAK:
        lives &= ~_settled(view, lives & view.owned_by(owner))
    return GrowingSites(sites, tuple(growth.rate for growth in ordered), lives, is_graph)


def _settled(view: DeviceView, lives: Mask) -> Mask:
    """Return what training needs and does not grow: all of it, unless more of it comes late."""
    born, ends = view.replayed.born, view.steps.ends
    grows = bool((lives & (born > ends[len(ends) // 2])).any())
    return lives & (born < ends[0]) if grows else lives


def leak_finding(view: DeviceView, growth: GrowingSites) -> Finding:
    """Make the finding of one cause of growth."""
    biggest = growth.sites[0]
    made_in = _phase(view, biggest) if growth.graph else None
    advice = ADVICE["growth elsewhere" if made_in is None else _GROWTH_IN[made_in]]
    rates = [
        f"{view.sites.names[site]} {size(rate)}"
        for site, rate in zip(growth.sites, growth.rates, strict=True)
    ]
    more = len(rates) - _SITES
    way = way_to(view, growth.lives & view.at_sites([biggest]))
    held = view.total(growth.lives)
    return Finding(
        kind="leak",
        device=view.device,
        bytes=held,
        bytes_per_step=growth.per_step,
        allocated_at=known_site(view.sites.names[biggest]),
        mechanism=advice.why,
        fix=advice.fix,
        playbook=advice.entry,
        phase=made_in,
        step=view.steps.count,
        evidence=[
            f"{size(growth.per_step)} more at the end of each step, over {view.steps.count} steps "
            f"(found by {view.steps.source})",
            f"by site, per step: {', '.join(rates[:_SITES])}" + (f", and {more} more" if more > 0 else ""),
            *([f"most of it is allocated by way of {way}"] if way else []),
            f"alive at the snapshot: {listed(view.by_site(growth.lives))}",
            "a recording has no holders: `memtriage run` names what keeps them",
        ],
    )


def _phase(view: DeviceView, site: int) -> Literal["forward", "backward"]:
    at_site = view.at_sites([site]) & (view.survived() > 0)
    phases = view.phases()
    forward = view.total(at_site & (phases == FORWARD))
    backward = view.total(at_site & (phases == BACKWARD))
    return "backward" if backward > forward else "forward"


_GROWTH_IN: Final[Mapping[Literal["forward", "backward"], SnapshotCause]] = {
    "forward": "growth in forward",
    "backward": "growth in backward",
}
