"""What phases learn, and priming for it, on the simulated allocator and with a GPU's figures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memtriage
from memtriage import PhasePolicy
from memtriage.model.blocks import DeviceCounters
from memtriage.treat import phase_needs
from memtriage.treat.device.cuda import CudaDevice
from memtriage.treat.phase import phase_end
from memtriage.treat.phase_needs import SPARE, Need, in_turn
from support.simulated_memory import SimulatedBlocks

GIB = 1 << 30
MIB = 1 << 20
MEMORY = 80 * GIB
QUIET = PhasePolicy(clear=False, residue=None, log=lambda text: None)


class Device(SimulatedBlocks):
    """It has a program whose lengths vary: without priming, what stays splits what is asked for again."""

    def batch(self, chance: random.Random) -> None:
        """Activations and logits of one micro-batch."""
        tokens = chance.randrange(4096, 8193, 64)
        blocks = [self.allocate(tokens << shift) for shift in (13, 13, 14, 13, 14)]
        logits = [self.allocate(tokens << 18) for _ in range(3)]
        for block in logits + blocks:
            self.free(block)

    def round(self, need: Need, seed: int, prime: bool) -> tuple[int, int]:
        """One round: scoring, states that come back, caches made again; returns reserved and allocated at
        their peaks."""
        chance = random.Random(seed)
        states = [16 * MIB] * 100
        simulator = self.simulator
        simulator.backing.peak_reserved = simulator.reserved
        need.begin(simulator.allocated, simulator.peak_allocated, sum(states))
        if prime:
            in_turn(need.blocks(simulator.reserved, MEMORY, MEMORY), self)
        for _ in range(4):
            self.batch(chance)
        live = [self.allocate(size) for size in states]
        activations = []
        for _ in range(60):
            live.append(self.allocate(12 * MIB))
            activations.append(self.allocate(chance.randrange(20, 80) * MIB))
        for block in activations:
            self.free(block)
        for _ in range(12):
            self.batch(chance)
        need.end(simulator.peak_allocated)
        peaks = simulator.peak_reserved, simulator.peak_allocated
        for block in live:
            self.free(block)
        simulator.empty_cache()
        need.left(simulator.reserved - simulator.allocated)
        return peaks


@pytest.mark.parametrize("seed", range(4))
def test_primed_rounds_reserve_less(seed: int) -> None:
    plain, primed = Device(), Device()
    without, learned = Need(), Need()
    rounds = [
        (
            plain.round(without, 10 * seed + number, prime=False)[0],
            primed.round(learned, 10 * seed + number, prime=True)[0],
        )
        for number in range(4)
    ]
    assert rounds[0][0] == rounds[0][1]  # nothing is known yet
    fragmented, packed = zip(*rounds[1:], strict=True)
    assert max(packed) < 0.85 * max(fragmented)
    assert learned.returned


def test_priming_raises_no_peak_of_what_is_allocated() -> None:
    plain, primed, need = Device(), Device(), Need()
    for number in range(3):
        _, expected = plain.round(Need(), number, prime=False)
        assert primed.round(need, number, prime=True)[1] == expected


@given(
    made=st.integers(0, 100 * GIB),
    allocated=st.integers(0, 40 * GIB),
    coming=st.integers(0, 40 * GIB),
    reserved=st.integers(0, 80 * GIB),
    free=st.integers(0, 80 * GIB),
)
def test_blocks_are_two_segments_that_fit(
    made: int, allocated: int, coming: int, reserved: int, free: int
) -> None:
    need = Need(made=made)
    need.begin(allocated, 0, coming)
    blocks = need.blocks(reserved, free, MEMORY)
    wanted = allocated + coming + made + made // SPARE - reserved
    if not blocks:
        assert min(wanted, free - MEMORY // 16) < 260 * MIB
        return
    first, second = blocks
    assert first % (2 * MIB) == 0 and second == first + 2 * MIB
    assert (
        min(wanted, free - MEMORY // 16) - 2 * MIB
        <= sum(blocks)
        <= min(wanted, free - MEMORY // 16) + 2 * MIB
    )


@pytest.mark.parametrize(
    ("known", "rounds", "made"),
    [
        # of each round: allocated, peak so far and parked bytes that come back; the peak at its end
        pytest.param(None, [(4, 5, 2, 30)], 24, id="what raised the peak"),
        pytest.param(None, [(4, 60, 0, 60)], None, id="below an earlier peak"),
        pytest.param(None, [(4, 0, 0, 30), (24, 30, 0, 30)], 6, id="states made in the first round stay"),
        pytest.param(20, [(4, 30, 0, 5)], 20, id="counters were reset meanwhile"),
    ],
)
def test_what_a_phase_makes_is_learned(
    known: int | None, rounds: list[tuple[int, int, int, int]], made: int | None
) -> None:
    need = Need(made=None if known is None else known * GIB)
    for allocated, before, coming, after in rounds:
        need.begin(allocated * GIB, before * GIB, coming * GIB)
        assert need.made is not None or need.blocks(allocated * GIB, MEMORY, MEMORY) == []
        need.end(after * GIB)
    assert need.made == (None if made is None else made * GIB)


def test_what_could_not_be_returned_is_not_primed_again() -> None:
    need = Need(made=20 * GIB)
    need.begin(0, 0, 0)
    assert need.blocks(0, MEMORY, MEMORY)
    need.primed = 20 * GIB
    need.left(1 * GIB)
    assert need.returned
    need.left(10 * GIB)
    need.begin(0, 0, 0)
    assert need.blocks(10 * GIB, MEMORY, MEMORY) == []


def test_blocks_that_do_not_fit_are_all_given_back() -> None:
    device = Device(capacity=30 * GIB)
    assert in_turn([16 * GIB, 31 * GIB], device) == 0
    assert (device.given_back, device.simulator.reserved) == (1, 0)
    assert in_turn([10 * GIB, 11 * GIB], device) == device.simulator.reserved == 21 * GIB
    assert device.peaks_forgotten == 0  # they are the program's


class Gpu:
    """Figures of a GPU, and what phases allocate on it."""

    def __init__(self) -> None:
        self.figures = DeviceCounters(allocated=GIB, reserved=GIB, peak_allocated=GIB)
        self.allocated: list[int] = []

    def allocate(self, size: int) -> int:
        self.allocated.append(size)
        return size

    def free(self, block: int) -> None:
        """It is in the cache then."""

    def give_back(self) -> None:
        raise AssertionError("memory suffices")

    def forget_peaks(self) -> None:
        raise AssertionError("peaks are the program's")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    known: dict[str, Any] = {
        "initialized": lambda: True,
        "devices": lambda: [0],
        "counters": lambda device: made.figures,
        "capacity": lambda device: MEMORY,
        "capturing": lambda: False,
        "backend": lambda: "native",
        "expandable_segments": lambda: False,
        "splits_any_block": lambda: True,
    }
    monkeypatch.setattr(phase_needs, "cuda", SimpleNamespace(**known))
    monkeypatch.setattr(phase_needs, "CudaBlocks", lambda device: made)
    monkeypatch.setattr(CudaDevice, "__init__", lambda self, index: None)
    monkeypatch.setattr(CudaDevice, "available", lambda self: 70 * GIB)
    phase_needs._needs.clear()
    yield made
    phase_needs._needs.clear()


def two_rounds(gpu: Gpu, policy: PhasePolicy) -> memtriage.Phase:
    """A phase that makes 8 GiB, twice; returns the second."""
    for _ in range(2):
        with memtriage.phase("train", policy) as phase:
            gpu.figures = DeviceCounters(allocated=GIB, reserved=10 * GIB, peak_allocated=9 * GIB)
        gpu.figures = DeviceCounters(allocated=GIB, reserved=GIB, peak_allocated=9 * GIB)
    return phase


def test_the_second_round_is_primed_for_what_the_first_made(gpu: Gpu) -> None:
    phase = two_rounds(gpu, QUIET)
    assert gpu.allocated == [4608 * MIB, 4610 * MIB]
    assert phase.primed == {0: sum(gpu.allocated)}


def test_a_round_that_is_the_first_to_use_the_gpu_is_learned_from(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(phase_needs.cuda, "devices", lambda: used)
    monkeypatch.setattr(phase_needs.cuda, "initialized", lambda: bool(used))
    monkeypatch.setattr(phase_needs.cuda, "backend", lambda: "native" if used else None)
    with memtriage.phase("train", QUIET):
        used.append(0)
        gpu.figures = DeviceCounters(allocated=GIB, reserved=10 * GIB, peak_allocated=9 * GIB)
    gpu.figures = DeviceCounters(allocated=GIB, reserved=GIB, peak_allocated=9 * GIB)
    with memtriage.phase("train", QUIET) as phase:
        pass
    # 1 GiB is alive and reserved already; the first round made 9 GiB, and an eighth of that is spare
    assert sum(gpu.allocated) == 9 * GIB + 9 * GIB // 8 + 2 * MIB
    assert phase.primed == {0: sum(gpu.allocated)}


def test_an_end_without_a_beginning_teaches_nothing(gpu: Gpu) -> None:
    phase_end("train", QUIET)
    assert phase_needs._needs == {}


@pytest.mark.parametrize("changed", [{"prime": False}, {"compact": False}])
def test_it_can_be_switched_off_and_needs_an_end_that_compacts(gpu: Gpu, changed: dict[str, bool]) -> None:
    assert two_rounds(gpu, replace(QUIET, **changed)).primed == {}
    assert gpu.allocated == []


def test_a_trial_without_phases_primes_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRIAGE_PHASE", "off")
    two_rounds(gpu, QUIET)
    assert gpu.allocated == []


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("expandable_segments", True),
        ("splits_any_block", False),
        ("capturing", True),
        ("backend", "cudaMallocAsync"),
        ("backend", None),
    ],
)
def test_other_allocators_are_left_alone(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, question: str, answer: Any
) -> None:
    monkeypatch.setattr(phase_needs.cuda, question, lambda: answer)
    two_rounds(gpu, QUIET)
    assert gpu.allocated == []


def test_phases_of_other_names_learn_apart(gpu: Gpu) -> None:
    two_rounds(gpu, QUIET)
    gpu.allocated.clear()
    with memtriage.phase("refit", QUIET) as phase:
        pass
    assert phase.primed == {} and gpu.allocated == []


def test_what_is_parked_and_comes_back_is_expected(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtriage.treat.parking.api.parked_by_device", lambda *what: {0: 2 * GIB})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    two_rounds(gpu, replace(QUIET, park=(optimizer,)))
    # 6 GiB are the phase's own, and an eighth of that is spare.
    assert sum(gpu.allocated) == 8 * GIB + 6 * GIB // 8 + 2 * MIB
