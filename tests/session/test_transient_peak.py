"""What comes and goes between two marks, distinguished from the allocator's peak."""

from __future__ import annotations

from collections.abc import Iterable

from memtriage.model.blocks import DeviceCounters
from memtriage.observe.counters import Reading
from memtriage.session.transient_peak import TransientPeak


def reading(allocated: int, peak: int, device: str = "cuda:0") -> list[Reading]:
    counters = DeviceCounters(allocated=allocated, peak_allocated=peak)
    return [Reading(device, allocated=allocated, counters=counters)]


def passed(marks: Iterable[tuple[int, int]]) -> dict[str, int]:
    transient = TransientPeak()
    for allocated, peak in marks:
        transient.at_mark(reading(allocated, peak))
    return transient.most()


def test_a_leaking_step_needs_its_activations_beyond_what_stays() -> None:
    assert passed((100 + 7 * step, 100 + 7 * step + 50) for step in range(9)) == {"cuda:0": 50}


def test_what_a_stretch_leaves_behind_does_not_pass() -> None:
    """The first step makes the optimizer's state: 80 of the 90 by which the peak rises stay."""
    assert passed([(40, 40), (120, 130)]) == {"cuda:0": 10}
    assert passed([(120, 120), (40, 130)]) == {"cuda:0": 10}


def test_a_peak_that_stands_says_nothing() -> None:
    assert passed([(40, 60)]) == {}
    assert passed([(40, 60), (44, 60), (48, 60)]) == {}


def test_a_peak_that_the_program_resets_counts_anew() -> None:
    assert passed([(40, 90), (40, 55)]) == {"cuda:0": 15}


def test_a_high_beginning_is_forgotten() -> None:
    steps = [(step, 20 + step) for step in range(900, 970)]
    assert passed([(10, 10), (10, 900), *steps[:9]]) == {"cuda:0": 890}
    assert passed([(10, 10), (10, 900), *steps]) == {"cuda:0": 20}


def test_devices_by_themselves_and_hosts_not_at_all() -> None:
    transient = TransientPeak()
    for step in range(3):
        transient.at_mark(
            [
                Reading("cpu", allocated=step),
                *reading(10 + step, 40 + step),
                *reading(10 + step, 90 + step, "cuda:1"),
            ]
        )
    assert transient.most() == {"cuda:0": 30, "cuda:1": 80}
