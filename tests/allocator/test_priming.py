"""Priming: each block gets a segment, and what a program's requests then reserve."""

from __future__ import annotations

import random

import pytest

from memtriage.allocator.driver import Driver
from memtriage.allocator.priming import (
    Circumstance,
    OtherAddresses,
    PackingTrial,
    compressed,
    peak_live,
    prime,
)
from memtriage.allocator.requests import EMPTIED, FREE, Request
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator

MIB = 1 << 20
TORCH = parse_conf("", "2.11")
TRIAL = PackingTrial(TORCH)


def test_an_emptied_cache_gives_primed_segments_back() -> None:
    requests = [(EMPTIED, FREE), (1, 64 * MIB)]
    assert TRIAL.run(requests, (100 * MIB,)) == 100 * MIB
    assert TRIAL.run([*requests, (2, 64 * MIB)], (100 * MIB,)) == 128 * MIB


def test_a_trial_ends_above_its_limit() -> None:
    assert TRIAL.run([(1, 64 * MIB)], (), limit=63 * MIB) is None
    assert TRIAL.run([(1, 64 * MIB)], (), limit=64 * MIB) == 64 * MIB


def test_each_primed_block_gets_a_segment() -> None:
    simulator = Simulator(TORCH)
    prime(simulator, (64 * MIB, 40 * MIB))
    assert (simulator.reserved, simulator.allocated) == (104 * MIB, 0)
    assert sorted(segment.size for segment in simulator.snapshot()) == [40 * MIB, 64 * MIB]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_other_addresses_are_distinct(seed: int) -> None:
    given = OtherAddresses(seed)
    addresses = [given.place(64 * MIB) for _ in range(200)]
    assert len(set(addresses)) == 200
    assert (addresses == sorted(addresses)) == (seed == 0)


def test_a_trial_may_be_under_other_addresses() -> None:
    trial = PackingTrial(TORCH)
    differ = 0
    for seed in range(8):
        requests = made_at_random(seed)
        usual, other, again = (trial.run(requests, (), under=Circumstance(at)) for at in (None, 1, 1))
        assert other == again
        differ += usual != other
    assert differ


@pytest.mark.parametrize(("driver", "lower"), [(Driver(), 1), (OtherAddresses(0), 0)])
def test_of_two_equal_blocks_the_one_at_the_lower_address_is_taken(driver: Driver, lower: int) -> None:
    simulator = Simulator(TORCH, driver=driver)
    segments = [simulator.malloc(64 * MIB), simulator.malloc(64 * MIB)]
    addresses = [block.address for block in segments]
    for block in segments:
        simulator.free(block)
    assert simulator.malloc(40 * MIB).address == addresses[lower] == min(addresses)


def made_at_random(seed: int) -> list[Request]:
    """Blocks of many sizes, three of them common; about one in three is freed at once."""
    chance = random.Random(seed)
    made: list[Request] = []
    live: list[int] = []
    for number in range(300):
        made.append(
            (number, chance.choice((3 * MIB, 24 * MIB, 60 * MIB, chance.randrange(2 * MIB, 90 * MIB))))
        )
        live.append(number)
        while live and chance.random() < 0.5:
            made.append((live.pop(chance.choice((-1, 0))), FREE))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_compressed_requests_need_the_same_memory(seed: int) -> None:
    requests = made_at_random(seed)
    shorter = compressed(requests)
    assert len(shorter) < len(requests)
    assert 0 <= peak_live(shorter) - peak_live(requests) < 512
    for blocks in ((), (700 * MIB,), (300 * MIB, 180 * MIB, 64 * MIB)):
        assert TRIAL.run(shorter, blocks) == TRIAL.run(requests, blocks)


def test_the_peak_of_live_memory_counts_blocks_that_are_freed_at_once() -> None:
    requests = [(0, 10 * MIB), (1, 30 * MIB), (1, FREE), (EMPTIED, FREE), (2, 5 * MIB), (0, FREE), (2, FREE)]
    assert peak_live(requests) == peak_live(compressed(requests)) == 40 * MIB


def test_memory_that_was_not_predicted_takes_room_of_primed_blocks() -> None:
    requests = [(0, 60 * MIB)]
    trial = PackingTrial(TORCH)
    assert trial.run(requests, (64 * MIB,)) == 64 * MIB
    assert trial.run(requests, (64 * MIB,), under=Circumstance(unpredicted=30 * MIB)) == 124 * MIB
    assert trial.run(requests, (64 * MIB,), under=Circumstance(0)) == 64 * MIB
    assert trial.simulated == 6  # a block and a request each
