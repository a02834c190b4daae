"""What the rules for recordings look at: one device, replayed and accounted for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memtriage.allocator.replay import ReplayedTrace
from memtriage.catalogue.catalogue import SPECIFIC
from memtriage.catalogue.entry import Holder
from memtriage.model.blocks import Segment
from memtriage.model.code_origin import is_installed, is_python
from memtriage.model.findings import Finding, FindingKind
from memtriage.model.recording import NO_FRAMES, OWNERS, Bytes8, Events, Figures, OomEvent, Stack, Steps
from memtriage.model.units import count, size
from memtriage.playbook.snapshots import ADVICE, SnapshotCause
from memtriage.snapshots.owners import SiteIndex, steps_survived
from memtriage.snapshots.steps import StackFacts, phase_codes

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
    trace: Events
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

    def finding(
        self, kind: FindingKind, cause: SnapshotCause, evidence: Sequence[str], **facts: Any
    ) -> Finding:
        """Make a finding, with what the playbook says of its cause unless `facts` say else."""
        advice = ADVICE[cause]
        told = {"mechanism": advice.why, "fix": advice.fix, "playbook": advice.entry, **facts}
        return Finding(kind=kind, device=self.device, evidence=list(evidence), **told)


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
    shown = [f"{site} ({size(total)} in {count(blocks, 'block')})" for site, total, blocks in rows[:most]]
    rest = rows[most:]
    if rest:
        shown.append(f"{len(rest)} more ({size(sum(total for _, total, _ in rest))})")
    return ", ".join(shown)


_FRAME: Final = re.compile(r"^(.*):\d+ in (\S+)$")


def entry_of_stack(frames: Iterable[str]) -> Holder | None:
    """Return the entry whose library function is innermost in a stack.

    Args:
        frames: `path/file.py:line in function`, innermost first.
    """
    for match in filter(None, map(_FRAME.match, frames)):
        for entry in SPECIFIC:
            if any(match[2] in site.functions and site.path in match[1] for site in entry.sites):
                return entry
    return None


def known_bytes(view: DeviceView, lives: Mask) -> list[tuple[Holder, int]]:
    """Return bytes of the marked lives by entry of the catalogue of known holders, biggest first.

    A recording has no objects: a block that a library's function allocated may be kept by something else.
    """
    sums: dict[str, tuple[Holder, int]] = {}
    for number, stack in enumerate(view.stacks):
        if entry := entry_of_stack(stack.frames):
            held = view.total(lives & (view.replayed.stack == number))
            sums[entry.name] = entry, sums.get(entry.name, (entry, 0))[1] + held
    return sorted((pair for pair in sums.values() if pair[1]), key=lambda pair: -pair[1])


def known_words(known: Sequence[tuple[Holder, int]]) -> list[str]:
    """Return a sentence of evidence; none where no entry is known."""
    if not known:
        return []
    parts = ", ".join(f"{entry.name} {size(held)}" for entry, held in known)
    return [f"known holders among them, by the functions that made them: {parts}"]
