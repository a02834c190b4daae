"""A counter: what it does over the run, and what it shows not to have happened."""

from __future__ import annotations

import math
import random

import pytest

from memtriage.diagnose.growth import counter as counter_module
from memtriage.diagnose.growth.counter import Counters, WatchedCounter

KIB = 1024
MIB = 1024 * KIB


def counter_of(values: list[int], name: str = "cpu") -> WatchedCounter:
    made = WatchedCounter(name)
    for step, value in enumerate(values, 1):
        made.add(step, value)
    return made


def growing(steps: int, rate: int, since: int = 0) -> list[int]:
    return [100 * MIB + max(0, step - since) * rate for step in range(steps)]


def noisy(steps: int, rate: int, noise: int) -> list[int]:
    chance = random.Random(7)
    return [100 * MIB + step * rate + chance.randrange(noise) for step in range(steps)]


def test_an_estimate_is_made_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = counter_of(growing(40, MIB)), []
    real = counter_module.estimate
    monkeypatch.setattr(counter_module, "estimate", lambda *given: asked.append(1) or real(*given))
    assert made.estimate() is made.estimate()
    assert made.estimate().state == "growing" and len(asked) == 1
    made.add(41, 200 * MIB)
    made.estimate()
    assert len(asked) == 2


def test_without_a_reading_nothing_is_known() -> None:
    made = WatchedCounter("cpu")
    assert made.estimate().state == "too_short"
    assert not made.contradicts(MIB, 0)


def test_a_flat_counter_contradicts_what_it_would_have_seen() -> None:
    made = counter_of(noisy(60, 0, 64 * KIB))
    assert made.contradicts(MIB, 3)
    assert made.contradicts(MIB, 20)


def test_it_does_not_contradict_what_its_noise_would_hide() -> None:
    made = counter_of(noisy(60, 0, 64 * MIB))
    assert not made.contradicts(64 * KIB, 3)


def test_it_does_not_contradict_growth_that_it_shows_in_part() -> None:
    made = counter_of(growing(60, MIB))
    assert not made.contradicts(MIB, 3)
    assert not made.contradicts(MIB // 2, 3)
    assert made.contradicts(4 * MIB, 3)


def test_what_was_before_growth_began_is_not_asked() -> None:
    made = counter_of(growing(400, MIB, since=350))
    assert not made.contradicts(MIB // 2, 352)


def test_too_few_readings_since_contradict_nothing() -> None:
    made = counter_of(growing(60, 0))
    assert made.contradicts(MIB, 40)
    assert not made.contradicts(MIB, 55)


def test_a_counter_of_a_device_sees_small_growth() -> None:
    assert counter_of(growing(60, 512), "cuda:0").estimate().state == "growing"
    assert counter_of(growing(60, 512), "shared").estimate().state != "growing"


def test_a_rise_between_two_positions_is_measured_against_a_rate() -> None:
    made = counter_of([*growing(60, MIB), *[160 * MIB] * 60])
    assert made.rose(MIB, 10, 50) and made.rose(2 * MIB, 10, 50)
    assert not made.rose(3 * MIB, 10, 50)
    assert not made.rose(MIB, 70, 110)
    assert not made.rose(MIB, 50, 50)
    assert not WatchedCounter("cpu").rose(MIB, 10, 50)


def test_growth_is_steady_unless_it_seems_to_slow_down() -> None:
    even = counter_of([at * MIB for at in range(60)])
    assert even.steady(MIB // 2) and not even.steady(2 * MIB)
    slower = counter_of([round(60 * (1 - math.exp(-at / 60)) * MIB) + at % 5 * 3 * MIB for at in range(60)])
    assert slower.confirms(MIB // 4) and not slower.steady(MIB // 4)


def test_growth_confirms_only_while_it_goes_on() -> None:
    going_on, stopped = counter_of(growing(300, MIB)), counter_of(growing(270, MIB) + 30 * [369 * MIB])
    assert going_on.confirms(MIB // 2) and not going_on.confirms(2 * MIB)
    assert not going_on.ended(MIB // 2)
    assert stopped.ended(MIB // 2) and not stopped.ended(2 * MIB)
    assert not stopped.confirms(MIB // 2)


def test_one_or_two_rises_do_not_contradict_sporadic_growth() -> None:
    made = counter_of([100 * MIB + step // 40 * 40 * MIB for step in range(400)])
    assert not made.contradicts(MIB // 2, 310)
    assert made.contradicts(8 * MIB, 310)


def test_a_counter_that_has_come_to_its_end_contradicts_what_it_had_shown() -> None:
    made = counter_of([*growing(100, MIB), *[200 * MIB] * 100])
    assert made.estimate().until is not None
    assert made.contradicts(3 * MIB, 0)


def test_a_question_to_a_counter_that_is_not_there_is_answered_no() -> None:
    flat, rising = counter_of(growing(60, 0)), counter_of(growing(300, MIB))
    ended = counter_of(growing(270, MIB) + 30 * [369 * MIB])
    counters = Counters(flat=flat, rising=rising, ended=ended)
    names = [*counters, "none"]
    assert [counters.contradicts(name, MIB // 2, 3) for name in names] == [True, False, False, False]
    assert [counters.confirms(name, MIB // 2) for name in names] == [False, True, False, False]
    assert [counters.steady(name, MIB // 2) for name in names] == [False, True, False, False]
    assert [counters.ended(name, MIB // 2) for name in names] == [False, False, True, False]
    assert [counters.rose(name, MIB, 10, 50) for name in names] == [False, True, True, False]
