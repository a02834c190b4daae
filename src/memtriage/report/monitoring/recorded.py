"""Where a recorded rank stood at its last mark: the gauges of a run that has ended, or goes on elsewhere."""

from __future__ import annotations

from memtriage.account.gpu_ledger import STRANDED
from memtriage.diagnose.growth.estimate import grow, policy_of
from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.diagnose.growth.track import Track
from memtriage.model.findings import GROWING
from memtriage.model.marks import Mark
from memtriage.model.run_status import MOST_NAMES, RunStatus, rows_of
from memtriage.report.monitoring.samples import HOST
from memtriage.store.reader import RankRecord


def status_of(rank: RankRecord) -> RunStatus:
    """Return where a rank stood when it wrote its last line; ledgers are those of its last census."""
    latest: dict[str, Mark] = {}
    named: dict[tuple[str, str], Mark] = {}
    names: set[str] = set()
    steps: dict[str, Track] = {}
    for mark in rank.marks:
        if mark.allocated is None:
            continue
        latest[mark.device] = mark
        if mark.name in names or len(names) < MOST_NAMES:
            names.add(mark.name)
            named[mark.device, mark.name] = mark
        if mark.name == "step":
            steps.setdefault(mark.device, Track(WARM_UP)).add(mark.step, mark.allocated)
    growths = {device: grow(track.points(), policy_of(device)) for device, track in steps.items()}
    last = rank.marks[-1] if rank.marks else None
    host = rank.ledgers.get(HOST)
    limits = {device: limit for device, limit in rank.device_limits.items() if device.startswith("cuda:")}
    if rank.start.host_limit is not None:
        limits[HOST] = rank.start.host_limit
    return RunStatus(
        rank=rank.start.rank,
        steps=rank.last_step,
        marked_at=(rank.start.time or 0.0) + (0.0 if last is None else last.time_s),
        latest=tuple(latest.values()),
        named=tuple(named.values()),
        stranded={
            device: rows_of(ledger).get(STRANDED, 0)
            for device, ledger in rank.ledgers.items()
            if device.startswith("cuda:")
        },
        peak_allocated={} if rank.end is None else rank.end.peak_allocated,
        passing={} if rank.end is None else rank.end.passing,
        limits=limits,
        growth={
            device: growth.recent if growth.state == "growing" else 0.0
            for device, growth in growths.items()
            if growth.state != "too_short"
        },
        host_rss=None if last is None else last.host_rss,
        host_pinned=None if last is None else last.host_pinned,
        host_classes={} if host is None else rows_of(host),
        ledgers=tuple(rank.ledgers.values()),
        leaks=tuple(finding for finding in rank.findings if finding.kind in GROWING),
    )
