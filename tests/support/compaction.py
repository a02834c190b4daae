"""A simulated device with storages of known bytes, and the function that finds them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from memtriage.allocator.settings import MIN_BLOCK
from memtriage.model.units import MIB
from memtriage.treat.compaction.one_device import Find
from memtriage.treat.compaction.plan import Movable
from memtriage.treat.device.protocol import DeviceLayout
from memtriage.treat.device.simulated import SimulatedStorage
from support.simulated_memory import DeviceWithBytes, SimulatedMemory

CONFS = ("", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:8")

SMALL = [600 + 37 * index % 50_000 for index in range(0, 90_000, 30)]
LARGE = [MIB + 70_000 * (index * 7 % 101) for index in range(60)]


@dataclass
class World:
    """A device, the storages alive on it, and what they should hold."""

    device: DeviceWithBytes
    storages: list[SimulatedStorage] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def allocate(self, nbytes: int, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> SimulatedStorage:
        """A storage with random bytes."""
        storage = SimulatedStorage(self.device.simulator.malloc(nbytes, stream, pool), nbytes)
        dice = np.random.default_rng(len(self.values))
        value = dice.integers(0, 255, self.memory.length(nbytes), dtype=np.uint8)
        self.memory.write(storage.data_ptr(), value)
        self.storages.append(storage)
        self.values.append(value)
        return storage

    def free(self, storages: Sequence[SimulatedStorage]) -> None:
        """Free some of the storages."""
        freed = set(map(id, storages))
        both = zip(self.storages, self.values, strict=True)
        left = [(storage, value) for storage, value in both if id(storage) not in freed]
        for storage in storages:
            assert storage.block is not None
            self.device.simulator.free(storage.block)
        self.storages = [storage for storage, _ in left]
        self.values = [value for _, value in left]

    @property
    def memory(self) -> SimulatedMemory:
        return self.device.memory

    def intact(self) -> bool:
        """True if every storage has its size and its bytes."""
        return all(
            self.memory.length(storage.nbytes()) == len(value)
            and bool((self.memory.read(storage.data_ptr(), storage.nbytes()) == value).all())
            for storage, value in zip(self.storages, self.values, strict=True)
        )

    def finder(self) -> AbstractContextManager[Find]:
        """A context that gives `find`, as `compact_device` expects it."""
        return nullcontext(self.find)

    def find(self, layout: DeviceLayout, blocks: Sequence[int]) -> Movable:
        """All storages can move."""
        known = {storage.data_ptr(): storage for storage in self.storages}
        movable = Movable()
        for block in blocks:
            address = int(layout.address[block])
            if address in known:
                movable.storages[block] = known[address]
            else:
                movable.reasons[block] = "nobody's"
        return movable


def make_world(
    conf: str = "",
    capacity: int | None = None,
    before: Callable[[str], None] | None = None,
    grain: int = MIN_BLOCK,
) -> World:
    """An empty device."""
    return World(DeviceWithBytes(conf, capacity, before, grain))


def fragmented(sizes: Sequence[int], keep_one_in: int, conf: str = "", grain: int = MIN_BLOCK) -> World:
    """Blocks of some sizes were allocated, and most of them freed."""
    world = make_world(conf, grain=grain)
    dice = random.Random(0)
    made = [world.allocate(size) for size in sizes]
    world.free([storage for storage in made if dice.randrange(keep_one_in)])
    return world


sizes_of_blocks = st.lists(
    st.one_of(
        st.integers(1, 3000),
        st.integers(30_000, MIB),
        st.sampled_from([MIB + 1, 3 * MIB, 5 * MIB, 9 * MIB + 77, 11 * MIB, 23 * MIB]),
    ),
    min_size=2,
    max_size=24,
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A device on which blocks were allocated, and some of them freed."""
    world = make_world(draw(st.sampled_from(CONFS)))
    for _ in range(draw(st.integers(1, 2))):
        stream = draw(st.sampled_from([0, 7]))
        made = [world.allocate(size, stream) for size in draw(sizes_of_blocks)]
        gone = draw(st.lists(st.sampled_from(range(len(made))), unique=True))
        world.free([made[index] for index in gone])
    return world
