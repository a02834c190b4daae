"""Successive censuses of one process that is read from outside, as lines of a record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memtriage.account.followed import Contents, FollowedHolders
from memtriage.model.census import Census, HolderGroup
from memtriage.model.evidence import CensusSeen, DataSeen
from memtriage.model.paths import is_native
from memtriage.model.position import TrainingPosition
from memtriage.outside.census import OutsideCensus


class FollowedOutside:
    """Recognizes the holders of one process from census to census."""

    def __init__(self) -> None:
        self._holders = FollowedHolders()
        self._known: set[int] = set()
        self._of_program: set[int] = set()

    def add(
        self, census: OutsideCensus, now: float, data: Sequence[DataSeen] = (), *, program_only: bool = False
    ) -> CensusSeen:
        """Return the line of a census that was read at so many seconds since the start."""
        named = [group for group in census.groups if not is_native(group.anchor)]
        taken = Census(
            storages=[], groups=named, objects=census.objects, nodes=census.nodes,
            seconds=census.seconds,
        )  # fmt: skip
        seen = self._holders.add(taken, Contents({}, {}), partial=program_only)
        for holder in seen:
            holder.detail = census.details.get((holder.device, holder.anchor))
        found = {holder.id for holder in seen}
        gone = sorted((self._of_program if program_only else self._known) - found)
        self._known |= found
        if program_only:
            self._of_program |= found
        return CensusSeen(
            position=TrainingPosition(time_s=now),
            work_s=now,
            between=not (program_only and census.missing),
            partial=program_only,
            holders=seen,
            gone=gone,
            data=list(data),
            totals={} if program_only else totals(named),
        )


def totals(groups: Iterable[HolderGroup]) -> dict[str, int]:
    """Return bytes by device."""
    found: dict[str, int] = {}
    for group in groups:
        found[group.device] = found.get(group.device, 0) + group.nbytes
    return found
