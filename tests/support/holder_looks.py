"""What entries of the catalogue find in this process, and what of it is cleared."""

from __future__ import annotations

from typing import Final

from memtriage.catalogue.catalogue import BUILT_IN, find_places, read_holders
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.scene import Scene
from memtriage.model.holders import HolderReading

ENTRIES: Final[dict[str, Holder]] = {holder.name: holder for holder in BUILT_IN}
"""The entries of the catalogue by name."""


def look(name: str) -> HolderReading:
    """What an entry holds, but for what other tests left behind; without places where it holds nothing."""
    with Scene() as scene:
        readings = read_holders(scene, [ENTRIES[name]])
    return readings[0] if readings else HolderReading(name=name)


def paths(name: str) -> list[str]:
    """Where an entry is found."""
    return [path for path, _ in look(name).places]


def clear_places(name: str) -> int:
    """Clear each place of an entry that has an action of its own; how many those are."""
    with Scene() as scene:
        actions = [place.clear for place in find_places(ENTRIES[name], scene) if place.clear is not None]
    for clear in actions:
        clear()
    return len(actions)
