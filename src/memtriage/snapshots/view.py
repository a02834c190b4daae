"""What the rules for recordings look at: one device, replayed and accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtriage.allocator.replay import ReplayedTrace
from memtriage.allocator.trace_columns import TraceColumns
from memtriage.model.blocks import Segment
from memtriage.model.code_origin import is_installed, is_python
from memtriage.model.recording import NO_FRAMES, OWNERS, Bytes8, Figures, OomEvent, Stack, Steps
from memtriage.model.units import size
from memtriage.snapshots.owners import steps_survived
from memtriage.snapshots.sites import SiteIndex
from memtriage.snapshots.stacks import StackFacts, phase_codes

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device.

    Attributes:
        device: `cuda:N`.
        trace, replayed: its events and their replay.
        stacks, facts: the recording's stacks, and what each says.
        sites: the site of each life.
        owners: of each life, as indices into `OWNERS`.
        steps: the training steps.
        segments: at the snapshot.
        end: the figures at the snapshot.
        ooms: the out-of-memory errors.
    """

    device: str
    trace: TraceColumns
    replayed: ReplayedTrace
    stacks: Sequence[Stack]
    facts: Sequence[StackFacts]
    sites: SiteIndex
    owners: Bytes8
    steps: Steps
    segments: Sequence[Segment]
    end: Figures
    ooms: Sequence[OomEvent]

    def owned_by(self, *names: str) -> Mask:
        """The lives of these owners."""
        return np.isin(self.owners, [OWNERS.index(name) for name in names])

    def phases(self) -> Bytes8:
        """The phase in which each life was allocated, as an index into `PHASES`."""
        return phase_codes(self.facts)[self.replayed.stack]

    def survived(self) -> NDArray[np.int64]:
        """How many step ends each life sees."""
        return steps_survived(self.replayed, self.steps.ends)

    def at_sites(self, sites: Iterable[int]) -> Mask:
        """The lives allocated at these sites."""
        return np.isin(self.sites.of_life, list(sites))

    def alive(self) -> Mask:
        """The lives in use at the snapshot."""
        return self.replayed.died < 0

    def total(self, lives: Mask) -> int:
        """Bytes of the marked lives."""
        return int(self.replayed.size[lives].sum())

    def by_site(self, lives: Mask) -> list[tuple[str, int, int]]:
        """Site, bytes and blocks of the marked lives, biggest first."""
        rows = []
        for site in np.unique(self.sites.of_life[lives]).tolist():
            at_site = lives & (self.sites.of_life == site)
            rows.append((self.sites.names[site], self.total(at_site), int(at_site.sum())))
        return sorted(rows, key=lambda row: (-row[1], row[0]))


def way_to(view: DeviceView, lives: Mask) -> str | None:
    """The program's own frames on the way to most of these lives, innermost first; None for less than two."""
    numbers, sizes = view.replayed.stack[lives], view.replayed.size[lives]
    if not len(numbers):
        return None
    biggest = int(np.argmax(np.bincount(numbers, weights=sizes)))
    frames = view.stacks[biggest].frames
    own = [
        frame.rpartition("/")[2]
        for frame in frames
        if is_python(frame.rpartition(":")[0]) and not is_installed(frame)
    ]
    return " < ".join(own) if len(own) > 1 else None


def known_site(site: str) -> str | None:
    """The site as findings name it; None where there were no frames."""
    return None if site == NO_FRAMES else site


def listed(rows: Sequence[tuple[str, int, int]], most: int = 5) -> str:
    """Sites in words: `train.py:17 in forward (1.1 GiB in 96 blocks), ...`."""
    shown = [f"{site} ({size(total)} in {count} {_blocks(count)})" for site, total, count in rows[:most]]
    rest = rows[most:]
    if rest:
        shown.append(f"{len(rest)} more ({size(sum(total for _, total, _ in rest))})")
    return ", ".join(shown)


def _blocks(count: int) -> str:
    return "block" if count == 1 else "blocks"
