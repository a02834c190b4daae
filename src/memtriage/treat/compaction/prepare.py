"""What can be done for a plan before the storages of its blocks are known: driver calls, during the search.

Both take about as long, and the driver's calls need no Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memtriage.treat.compaction.holds import Holds, release_all
from memtriage.treat.compaction.plan import CompactionPlan, Group
from memtriage.treat.device.layout import DeviceLayout
from memtriage.treat.device.protocol import Device, is_out_of_memory

Bins = dict[tuple[int, int], int]
"""Addresses of bins that are held, by index of their group in the plan and of the bin in its group."""


@dataclass(slots=True)
class Prepared:
    """Bins that are held for a plan; each is to be released once.

    Attributes:
        device: where.
        reserved: bytes of segments when what was free had been given back, and nothing made yet.
        bins: those held.
    """

    device: Device
    reserved: int = 0
    bins: Bins = field(default_factory=dict)

    def take(self, group: int, index: int) -> int | None:
        """The address of a bin, which is the caller's from now on; None if there is none."""
        return self.bins.pop((group, index), None)

    def drop(self) -> None:
        """Release what nobody took."""
        addresses = list(self.bins.values())
        self.bins.clear()
        release_all(self.device, addresses)


def give_back(prepared: Prepared) -> None:
    """Give back what is free."""
    prepared.device.empty_cache()
    prepared.reserved = prepared.device.use().reserved


def make_bins(prepared: Prepared, layout: DeviceLayout, plan: CompactionPlan, spare: int) -> None:
    """Make all bins if there is memory for all at once.

    Args:
        prepared: takes the bins in as they are made.
        layout: as the plan was made from.
        plan: what is to be done.
        spare: device memory to leave alone.
    """
    wanted = sum(target.size for group in plan.groups for target in group.bins)
    # A scratch copy takes as much again.
    if wanted == 0 or prepared.device.available() < 2 * wanted + spare:
        return
    try:
        for number, group in enumerate(plan.groups):
            _make_bins(prepared, layout, number, group)
    except BaseException as error:
        prepared.drop()
        if not is_out_of_memory(error):
            raise


def _make_bins(prepared: Prepared, layout: DeviceLayout, number: int, group: Group) -> None:
    sizes = {index: target.size for index, target in enumerate(group.bins) if target.size}
    if not sizes:
        return
    with Holds(prepared.device, group.stream, layout.settings) as holds:
        # A bin in what is to go would keep it.
        holds.take_holes(layout, group.islands, at_least=min(sizes.values()))
        for index, size in sizes.items():
            prepared.bins[number, index] = prepared.device.allocate(size, group.stream)
