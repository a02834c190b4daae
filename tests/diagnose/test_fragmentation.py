"""Fragmentation that grows: from the counters of simulated training, and of made-up courses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.diagnose.fragmentation import ReservedCourse, ReservedGrowth, fragmentation_finding
from memtriage.model.units import MIB

_STEPS = 200


def growth_of(counters: Iterable[tuple[int, int]]) -> ReservedGrowth | None:
    course = ReservedCourse()
    for step, (reserved, peak) in enumerate(counters, 1):
        course.add(step, reserved, peak)
    return course.growth()


def trained(unit: Callable[[int], int], conf: str = "") -> list[tuple[int, int]]:
    """Reserved and the peak of allocated after each step, in bytes, of training that keeps some results.

    Each step allocates eight activations of about `unit` bytes and, between them, two results that stay.
    """
    simulator, counters, peak = Simulator(parse_conf(conf, "2.11")), [], 0
    for step in range(_STEPS):
        activations = []
        for layer in range(8):
            activations.append(simulator.malloc(unit(step) * (layer + 8) // 8))
            if layer % 4 == 1:
                simulator.malloc(3 * MIB // 2)
        peak = max(peak, simulator.allocated)
        for block in activations:
            simulator.free(block)
        counters.append((simulator.reserved, peak))
    return counters


def lengthening(step: int) -> int:
    return (20 + step // 4) * MIB


def test_results_between_activations_that_get_longer_fragment_the_cache() -> None:
    counters = trained(lengthening)
    growth = growth_of(counters)
    assert growth is not None
    assert growth.steps == (4, _STEPS)
    assert growth.reserved == (counters[3][0], counters[-1][0])
    assert growth.peak == (counters[3][1], counters[-1][1])
    assert growth.beyond == counters[-1][0] - counters[-1][1]
    assert growth.rise == growth.beyond - (counters[3][0] - counters[3][1])


def test_rare_long_batches_fragment_it_even_if_nothing_stays() -> None:
    counters = trained(lambda step: round(random.Random(step).paretovariate(2) * 20 * MIB))
    assert growth_of(counters) is not None


def test_steps_of_one_size_or_of_a_few_do_not() -> None:
    assert growth_of(trained(lambda _: 40 * MIB)) is None
    assert growth_of(trained(lambda step: random.Random(step).choice((24, 32, 40)) * MIB)) is None


def test_expandable_segments_do_not_either() -> None:
    assert growth_of(trained(lengthening, conf="expandable_segments:True")) is None


def course(beyond: Iterable[int], peak: int = 1000 * MIB) -> ReservedGrowth | None:
    return growth_of((peak + each, peak) for each in beyond)


def test_a_steady_rise_beyond_the_peak_is_reported() -> None:
    growth = course(step * 2 * MIB for step in range(100))
    assert growth == ReservedGrowth((4, 100), (1006 * MIB, 1198 * MIB), (1000 * MIB, 1000 * MIB))
    assert growth.rise == 192 * MIB


def test_what_comes_to_an_end_is_not() -> None:
    assert course(min(step, 40) * 4 * MIB for step in range(100)) is None
    assert course(min(step, 60) * 4 * MIB for step in range(100)) is not None


def test_a_single_rise_is_not() -> None:
    assert course(300 * MIB * (step > 60) for step in range(100)) is None


def test_a_small_part_of_the_peak_is_not() -> None:
    assert course((step * MIB for step in range(100)), peak=10_000 * MIB) is None
    assert course((step * MIB // 2 for step in range(100)), peak=100 * MIB) is None


def test_a_rise_of_64_mib_is_reported() -> None:
    rise = [step * 64 * MIB // 96 for step in range(100)]  # from the fourth step on
    assert course(rise, peak=100 * MIB) is not None
    assert course([*rise[:-1], rise[-1] - 1], peak=100 * MIB) is None


def test_few_steps_say_nothing() -> None:
    steep = [step * 20 * MIB for step in range(19)]
    assert course(steep[:18]) is None
    assert course(steep) is not None


def test_growth_of_what_is_allocated_is_no_fragmentation() -> None:
    assert growth_of((step * 40 * MIB, step * 38 * MIB) for step in range(8, 40)) is None


def test_a_peak_that_the_program_resets_still_counts() -> None:
    assert growth_of((1000 * MIB + step * MIB, 1000 * MIB if step < 5 else 10) for step in range(100)) == (
        course(step * MIB for step in range(100))
    )


def test_the_finding_has_figures_and_what_would_help() -> None:
    growth = ReservedGrowth((4, 104), (1000 * MIB, 1500 * MIB), (900 * MIB, 950 * MIB))
    finding = fragmentation_finding("cuda:1", growth, "at step 90: 3 segments", None, expandable=False)
    assert (finding.kind, finding.device, finding.step) == ("fragmentation", "cuda:1", 104)
    assert (finding.bytes, finding.bytes_per_step) == (550 * MIB, round(4.5 * MIB))
    assert finding.evidence == [
        "reserved rose from 1000.0 MiB to 1.5 GiB between steps 4 and 104, the most that was allocated from "
        "900.0 MiB to 950.0 MiB",
        "at step 90: 3 segments",
    ]
    assert finding.fix is not None and finding.fix.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable")
    again = fragmentation_finding("cuda:1", growth, None, "would move 1.0 GiB", expandable=True)
    assert again.evidence[1:] == ["would move 1.0 GiB"]
    assert again.fix is not None and again.fix.startswith("call `memtriage.compact()`")
