"""A simulator that was brought into a captured state does what the original does."""

import random

import pytest

from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.allocator.state import States

MIB = 1 << 20
CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "per_process_memory_fraction:0.7",
)
SIZES = [100, 512, 70_000, MIB, MIB + 1, 3 * MIB, 11 * MIB, 20 * MIB, 45 * MIB]
OPERATIONS = 400


class Program:
    """Allocates, shares, frees and empties the cache by chance; blocks have numbers for names."""

    def __init__(self, simulator, seed):
        self.simulator = simulator
        self.chance = random.Random(seed)
        self.live = {}

    def run(self, count):
        """What the allocator's counters are after each operation."""
        seen = []
        for _ in range(count):
            seen.append((self.operation(), self.counters()))
        return seen

    def counters(self):
        simulator = self.simulator
        return simulator.allocated, simulator.reserved, simulator.awaiting, simulator.requested

    def operation(self):
        chance = self.chance.random()
        if chance < 0.5 or not self.live:
            size, stream = self.chance.choice(SIZES), self.chance.choice([0, 0, 7])
            name = ("block", self.chance.random())
            try:
                self.live[name] = self.simulator.malloc(size, stream)
            except OutOfMemory:
                return "out of memory"
            return "malloc"
        name = self.chance.choice(sorted(self.live))
        if chance < 0.85:
            self.simulator.free(self.live.pop(name))
        elif chance < 0.92:
            self.simulator.record_stream(self.live[name], self.chance.choice([0, 7, 9]))
        elif chance < 0.98:
            self.simulator.stream_done(self.chance.choice([0, 7, 9]))
        else:
            self.simulator.empty_cache()
        return "other"


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("version", ["2.11", "2.13"])
@pytest.mark.parametrize("seed", range(4))
def test_what_follows_a_restored_state_is_what_follows_the_original(conf, version, seed):
    def new():
        return Simulator(parse_conf(conf, version if "fraction" not in conf else "2.13"), capacity=600 * MIB)

    program = Program(new(), seed)
    program.run(OPERATIONS)
    states = States()
    assert States.has(program.simulator)
    state = states.capture(program.simulator, {block: name for name, block in program.live.items()})
    again = Program(new(), seed)
    again.live = states.restore(state, again.simulator)
    again.chance.setstate(program.chance.getstate())
    assert set(again.live) == set(program.live)
    assert states.capture(again.simulator, {block: name for name, block in again.live.items()}) == state
    later = program.run(OPERATIONS)
    assert again.run(OPERATIONS) == later
    assert {kind for kind, _ in later} >= {"malloc", "other"}


def test_blocks_that_differ_only_in_name_are_told_apart():
    simulator = Simulator(parse_conf("", "2.13"))
    first, second = simulator.malloc(512), simulator.malloc(512)
    states = States()
    one = states.capture(simulator, {first: "a", second: "b"})
    assert states.capture(simulator, {first: "b", second: "a"}) != one
    assert states.capture(simulator, {first: "a", second: "b"}) == one


def test_states_of_simulators_that_go_by_age_cannot_be_compared():
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    assert not States.has(Simulator(parse_conf(conf, "2.13"), device_memory=1 << 30))
    pooled = Simulator(parse_conf("", "2.13"))
    pooled.malloc(512, pool=(1, 0))
    assert not States.has(pooled)
