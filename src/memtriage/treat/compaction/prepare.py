"""Make driver calls for a plan while the storages of its blocks are searched.

Both take about equally long, and the driver calls do not need Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memtriage.treat.compaction.holds import Holds, release_all
from memtriage.treat.compaction.plan import CompactionPlan, Group
from memtriage.treat.device.layout import DeviceLayout
from memtriage.treat.device.protocol import OUT_OF_MEMORY, Device

Bins = dict[tuple[int, int], int]
"""Addresses of held bins, by index of the group in the plan and of the bin in the group."""


@dataclass(slots=True)
class Prepared:
    """Bins that are held for a plan; each must be released once.

    Attributes:
        device: their device.
        reserved: bytes of segments after free memory was returned, and before any bin was made.
        bins: the held bins.
    """

    device: Device
    reserved: int = 0
    bins: Bins = field(default_factory=dict)

    def take(self, group: int, index: int) -> int | None:
        """Pass a bin to the caller: its address; None if there is none."""
        return self.bins.pop((group, index), None)

    def drop(self) -> None:
        """Release the bins that were not taken."""
        addresses = list(self.bins.values())
        self.bins.clear()
        release_all(self.device, addresses)


def make_bins(prepared: Prepared, layout: DeviceLayout, plan: CompactionPlan, spare: int) -> None:
    """Make all bins if there is memory for all at once."""
    wanted = sum(target.size for group in plan.groups for target in group.bins)
    # A scratch copy takes the same amount.
    if wanted == 0 or prepared.device.available() < 2 * wanted + spare:
        return
    try:
        for number, group in enumerate(plan.groups):
            _make_bins(prepared, layout, number, group)
    except BaseException as error:
        prepared.drop()
        if not isinstance(error, OUT_OF_MEMORY):
            raise


def _make_bins(prepared: Prepared, layout: DeviceLayout, number: int, group: Group) -> None:
    sizes = {index: target.size for index, target in enumerate(group.bins) if target.size}
    if not sizes:
        return
    with Holds(prepared.device, group.stream, layout.settings) as holds:
        # A bin in an island that should be emptied would pin it.
        holds.take_holes(layout, group.islands, at_least=min(sizes.values()))
        for index, size in sizes.items():
            prepared.bins[number, index] = prepared.device.allocate(size, group.stream)
