"""What grew from census to census, against the counters: which of it is a leak, and how surely."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from memtriage.diagnose.growth.counter import Counters, WatchedCounter
from memtriage.diagnose.growth.history import HolderHistory
from memtriage.diagnose.growth.holders import (
    AwaitingCollector,
    DataGrowth,
    GrowingData,
    HolderGrowth,
    at_counters_rate,
    data_growths,
    growths,
    stops_when_full,
    waits_for_collector,
)
from memtriage.model.census import GroupDetail
from memtriage.model.paths import in_words
from support.censuses import group, point
from support.expected import assert_as_kept
from support.paths import named

KIB = 1024
MIB = 1024 * KIB


def counter_of(values: list[int]) -> WatchedCounter:
    made = WatchedCounter("cpu")
    for step, value in enumerate(values, 1):
        made.add(step, value)
    return made


def holders(sizes: dict[float, dict[str, int]]) -> HolderHistory:
    """Holders' MiB, each a storage, by position and name."""
    made = HolderHistory()
    for at, held in sizes.items():
        made.add(point(at, *(group(name, n * MIB, n, token=hash(name)) for name, n in held.items())))
    return made


def judged(
    history: HolderHistory, counter: WatchedCounter, *, period: float | None = None, now: float = 0
) -> dict[str, HolderGrowth]:
    grown = growths(
        history.growing(period),
        lambda holding: holding.group.device,
        lambda name, rate, since: counter.contradicts(rate, since),
        period,
        now,
        lambda name, rate: counter.confirms(rate),
        lambda name, rate: counter.ended(rate),
        lambda name, rate, start, end: counter.rose(rate, start, end),
        lambda name, rate, since: counter.flat(rate, since),
        lambda name, rate: counter.steady(rate),
    )
    return {in_words(each.holding.group.anchor): each for each in grown}


CENSUSES = (3, 12, 14, 20)


def test_a_holder_that_grows_and_whose_counter_agrees_is_proven() -> None:
    history = holders({at: {"losses": at} for at in CENSUSES})
    growth = judged(history, counter_of([at * MIB for at in range(30)]))["losses"]
    assert (growth.proof.certainty, growth.proof.rate, growth.device) == ("proven", MIB, "cpu")


def test_a_holder_that_a_flat_counter_contradicts_is_left_out() -> None:
    history = holders({at: {"losses": at, "other": 1} for at in CENSUSES})
    assert judged(history, counter_of([100 * MIB] * 30)) == {}


def test_growth_that_replaces_something_else_is_no_leak() -> None:
    """What one holder gets, another loses: memory does not grow."""
    history = holders({at: {"full": at, "free": 30 - at} for at in CENSUSES})
    assert judged(history, counter_of([100 * MIB] * 30)) == {}


def test_late_onset_is_judged_by_readings_since_then() -> None:
    grown = {step: max(0, step - 200) for step in range(1, 260)}
    history = holders({at: {"losses": 1 + grown[at]} for at in (3, 12, 48, 192, 212, 220, 236, 250)})
    growth = judged(history, counter_of([100 * MIB + n * MIB for n in grown.values()]))["losses"]
    assert growth.proof.certainty == "proven"
    assert growth.proof.rate == pytest.approx(MIB, rel=0.3)


def test_periodic_growth_is_proven_over_whole_periods() -> None:
    history = holders({at: {"metrics": at // 60} for at in (130, 190, 250, 370)})
    counter = counter_of([(100 + at // 60) * MIB for at in range(380)])
    growth = judged(history, counter, period=60)["metrics"]
    assert growth.proof.certainty == "proven"
    assert growth.proof.rate == pytest.approx(MIB / 60)


def test_one_allocation_is_only_a_suspicion_of_one_interval() -> None:
    history = holders({at: {"base": 2, "cache": 2 + (at > 12)} for at in (3, 12, 48)})
    growth = judged(history, counter_of([100 * MIB + (at > 12) * MIB for at in range(50)]))
    assert all(each.proof.certainty == "suspected" and each.proof.intervals == 1 for each in growth.values())


@pytest.mark.parametrize(
    ("early", "others", "certainty"), [(5, 0, "proven"), (5, 5, "suspected"), (1, 0, "proven")]
)
def test_a_burst_of_censuses_is_no_doubt_where_the_counter_has_the_holders_shape(
    early: int, others: int, certainty: str
) -> None:
    """A program that catches up while censuses are taken grows faster then; another leak explains nothing."""

    def held(step: int) -> int:
        return step + (early - 1) * min(6, max(0, step - 10))

    history = holders({at: {"losses": held(at)} for at in (10, 12, 14, 16, 100)})
    counter = counter_of([(held(step) + others * step) * MIB for step in range(1, 111)])
    assert judged(history, counter)["losses"].proof.certainty == certainty


def test_an_early_burst_is_a_doubt_where_half_of_the_time_is_looked_at() -> None:
    history = holders({at: {"losses": size} for at, size in ((10, 10), (30, 110), (50, 210), (70, 220))})
    counter = counter_of([10 * step * MIB for step in range(1, 80)])
    assert judged(history, counter)["losses"].proof.certainty == "suspected"


def test_a_burst_is_a_doubt_where_its_counter_slows_down_as_well() -> None:
    """A cache with an entry for each of 17 shapes, in a run of 33 steps."""
    seen = [0, 1, 2, 3, 4, 5, 5, 5, 6, 6, 6, 6, 7, 8, 8, 8, 8, 9, 9, 9, 9, 10, 11, 11, 11, 11, 11, 11, 11, 11]
    seen += [12, 12, 12, 12]
    history = holders({at: {"cache": seen[at]} for at in (3, 6, 10, 30)})
    assert judged(history, counter_of([each * MIB for each in seen]))["cache"].proof.uneven


@pytest.mark.parametrize(
    ("counted", "certainty"),
    [
        pytest.param(lambda step: 1.1 * step, "proven", id="steadily"),
        pytest.param(lambda step: 1.6 * step, "suspected", id="something else, too"),
        pytest.param(lambda step: 60 * (1 - math.exp(-step / 50)), "suspected", id="slower and slower"),
    ],
)
def test_what_slows_down_is_proven_where_it_is_all_that_its_counter_shows(
    counted: Callable[[int], float], certainty: str
) -> None:
    history = holders({at: {"losses": size} for at, size in ((10, 10), (30, 38), (50, 60), (70, 76))})
    counter = counter_of([100 * MIB + round(counted(step) * MIB) for step in range(1, 80)])
    proof = judged(history, counter)["losses"].proof
    assert (proof.certainty, proof.fills) == (certainty, certainty == "suspected")


def backlog(counter: WatchedCounter) -> dict[str, HolderGrowth]:
    """A queue that is longer at each census, with other entries each time."""
    history = HolderHistory()
    for at in CENSUSES:
        made = range(1000 * at, 1000 * at + at)
        history.add(point(at, group("jobs[*]", at * MIB, at, token=1, witnesses=made, entries=at)))
    return judged(history, counter)


def test_backlog_of_a_queue_is_proven_where_its_counter_shows_it() -> None:
    assert backlog(counter_of([at * MIB for at in range(30)]))["jobs[*]"].proof.certainty == "proven"


@pytest.mark.parametrize(("each", "multiply"), [(1, True), (30, False)])
def test_a_new_dict_at_each_step_is_told_from_lists_that_get_longer(each: int, multiply: bool) -> None:
    history = HolderHistory()
    for at in CENSUSES:
        tokens = range(max(1, at // each))
        kept = group("kept[*]", at * MIB, at, witnesses=range(at), entries=at)
        history.add(point(at, msgspec.structs.replace(kept, holders=dict.fromkeys(tokens, MIB))))
    growth = judged(history, counter_of([at * MIB for at in range(30)]))["kept[*]"]
    assert growth.holders_multiply == multiply


def test_batches_of_varying_size_in_one_list_are_no_suspicion() -> None:
    chance = random.Random(1)
    assert backlog(counter_of([chance.randrange(40) * MIB for _ in range(30)])) == {}


def test_the_fastest_growth_comes_first() -> None:
    history = holders({at: {"slow": at, "fast": 3 * at} for at in CENSUSES})
    assert list(judged(history, counter_of([4 * at * MIB for at in range(30)]))) == ["fast", "slow"]


def test_pauses_between_rises_are_no_stop_while_the_counter_grows() -> None:
    """A rise comes every 176 steps; the counter's blocks do not show the period."""
    censuses = (384, 572, 748, 996, 1170, 1202, 1266, 2075, 2497)
    history = holders({at: {"predictions": (at + 109) // 176} for at in censuses})
    growing = counter_of([(100 + (at + 109) // 176) * MIB for at in range(2498)])
    assert judged(history, growing, now=2497)["predictions"].proof.certainty == "proven"
    jumps = counter_of([100 * MIB] * 2498)
    assert "predictions" not in judged(history, jumps, now=2497)


@pytest.mark.parametrize(
    ("held", "counted", "certainty"),
    [
        pytest.param(lambda at: min(at, 31), lambda at: min(at, 31), "suspected", id="stopped"),
        pytest.param(lambda at: min(at, 31), lambda at: min(at, 31) + at, "suspected", id="other goes on"),
        pytest.param(lambda at: min(at, 0.6 * at + 4), lambda at: at, "proven", id="counter goes on"),
    ],
)
def test_what_may_have_stopped_at_the_end_needs_a_counter_that_rose_since(
    held: Callable[[int], float], counted: Callable[[int], float], certainty: str
) -> None:
    censuses = {at: {"cache": round(10 * held(at)), "other": 10 * at} for at in (3, 6, 8, 10, 39)}
    chance = random.Random(0)
    only = certainty == "proven"
    history = holders({at: {"cache": sizes["cache"]} if only else sizes for at, sizes in censuses.items()})
    counter = counter_of([round((10 * counted(at) + chance.randrange(3)) * MIB) for at in range(1, 40)])
    assert judged(history, counter, now=39)["cache"].proof.certainty == certainty


@pytest.mark.parametrize("full_at", [180, 400])
def test_a_counter_that_is_flat_before_the_end_says_that_a_cache_is_full(full_at: int) -> None:
    """Each length of batch comes later than the one before and takes more; the last is the longest."""
    chance = random.Random(0)
    held = [min(at, full_at) // 6 * 2 for at in range(401)]
    history = holders({at: {"masks": held[at]} for at in (60, 68, 84, 110)})
    history.add(point(400, group("masks", held[400] * MIB, held[400], token=hash("masks"))), between=False)
    counter = counter_of([round((100 + size + chance.random() / 4) * MIB) for size in held[1:]])
    assert ("masks" in judged(history, counter, now=400)) is (full_at == 400)


@pytest.mark.parametrize(("later", "rate"), [(1.0, MIB), (3.0, 2 * MIB)])
def test_growth_that_becomes_faster_after_the_last_census_has_the_rate_of_its_counter(
    later: float, rate: int
) -> None:
    history = holders({at: {"losses": at} for at in CENSUSES})
    cpu = counter_of([round(at + (later - 1) * max(0, at - 20)) * MIB for at in range(1, 60)])
    growing = list(judged(history, cpu, now=59).values())
    (growth,) = at_counters_rate(growing, Counters(cpu=cpu))
    assert growth.proof.rate == pytest.approx(rate, rel=0.5 if later > 1 else 0.01)
    assert (growth.proof.rate > 1.5 * MIB) == (later > 1)


def test_a_counter_that_other_growth_moves_gives_no_rate() -> None:
    history = holders({at: {"losses": at} for at in CENSUSES})
    cpu = counter_of([3 * at * MIB for at in range(1, 60)])
    (growth,) = at_counters_rate(list(judged(history, cpu, now=59).values()), Counters(cpu=cpu))
    assert growth.proof.rate == MIB


# --- after the last census ---------------------------------------------------------------------------------


def noisy(sizes: list[int]) -> WatchedCounter:
    """A counter too noisy to see a holder of these MiB."""
    chance = random.Random(3)
    return counter_of([size * MIB + chance.randrange(4000) * MIB for size in sizes])


@pytest.mark.parametrize(("now", "certainty"), [(24, "proven"), (25, "suspected"), (90, "suspected")])
def test_unseen_growth_stays_proven_for_a_quarter_more_time(now: int, certainty: str) -> None:
    history = holders({at: {"losses": at} for at in CENSUSES})
    growth = judged(history, noisy([*range(now)]), now=now)["losses"]
    assert growth.proof.certainty == certainty
    assert (growth.proof.reason is None) == (certainty == "proven")


def test_what_its_counter_shows_stays_proven() -> None:
    history = holders({at: {"losses": at} for at in CENSUSES})
    growth = judged(history, counter_of([at * MIB for at in range(300)]), now=299)["losses"]
    assert growth.proof.certainty == "proven"


def test_another_leak_does_not_confirm_a_full_cache() -> None:
    history = holders({at: {"losses": at, "cache": at} for at in CENSUSES})
    judgments = judged(history, counter_of([(at + min(at, 30)) * MIB for at in range(300)]), now=299)
    assert {growth.proof.certainty for growth in judgments.values()} == {"suspected"}


def test_a_counter_that_has_just_stopped_makes_a_suspicion() -> None:
    history = holders({at: {"losses": at} for at in (3, 12, 24, 48, 92)})
    growth = judged(history, counter_of([min(at, 93) * MIB for at in range(105)]), now=104)["losses"]
    assert growth.proof.certainty == "suspected"


def test_a_counter_that_has_been_flat_for_a_while_ends_a_proof() -> None:
    history = holders({at: {"cache": min(at, 150)} for at in (10, 20, 40, 80, 160)})
    assert judged(history, counter_of([min(at, 150) * MIB for at in range(200)]), now=199) == {}


def test_sporadic_data_leaks_where_the_resident_set_grows() -> None:
    data = data_of({30: 1, 60: 2, 120: 4, 240: 8}, 300 * MIB)
    assert judged_data(data) == []
    (found,) = judged_data(data, host=[500 * MIB + at // 30 * 300 * MIB for at in range(300)])
    assert (found.proof.certainty, found.proof.rate) == ("proven", 10 * MIB)


# --- containers of ordinary data ----------------------------------------------------------------------------


def data_of(entries: dict[float, int], entry_bytes: int = 10 * KIB) -> GrowingData:
    return GrowingData(named("texts"), "list", None, entry_bytes, tuple(entries.items()))


def judged_data(*data: GrowingData, **readings: list[int]) -> list[DataGrowth]:
    """Judge containers; `readings` are those of counters, by name."""
    counters = {name: counter_of(values) for name, values in readings.items()}
    return data_growths(
        data,
        lambda name, rate, since: name in counters and counters[name].contradicts(rate, since),
        confirms=lambda name, rate: name in counters and counters[name].confirms(rate),
    )


def test_data_that_grows_at_every_step_is_proven() -> None:
    (found,) = judged_data(data_of({3: 3, 12: 12, 14: 14, 20: 20}))
    assert (found.proof.certainty, found.proof.rate) == ("proven", 10 * KIB)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(data_of({3: 3, 12: 12, 14: 14, 20: 20}, entry_bytes=60), id="a log of losses"),
        pytest.param(data_of({3: 1, 12: 2, 48: 3, 192: 9}, MIB), id="an entry now and then"),
        pytest.param(data_of({3: 3, 12: 12, 14: 14, 20: 14}), id="has filled"),
    ],
)
def test_other_data_is_not_proven(data: GrowingData) -> None:
    assert [each for each in judged_data(data) if each.proof.certainty == "proven"] == []


def test_an_entry_now_and_then_is_proven_where_a_counter_shows_it() -> None:
    data = data_of({3: 1, 13: 2, 26: 3, 34: 4, 60: 6}, 10 * MIB)
    assert judged_data(data) == []
    for counter in ("host", "cpu"):
        (found,) = judged_data(data, **{counter: [500 * MIB + at * MIB for at in range(60)]})
        assert found.proof.certainty == "proven"


def test_data_has_the_rate_and_the_sizes_of_its_entries() -> None:
    data = data_of({3: 1, 13: 2, 23: 5}, 10 * MIB)
    assert data.rate == 2 * MIB
    assert data.sizes == [(3, 10 * MIB), (13, 20 * MIB), (23, 50 * MIB)]
    (growth,) = judged_data(data_of({3: 3, 12: 12, 14: 14, 20: 20}))
    assert growth.points == growth.data.sizes and growth.last == 20


@pytest.mark.parametrize(
    ("bound", "entries", "attached", "stops"),
    [
        (None, 9, False, False),
        (10, None, False, True),
        (10, 1, False, True),
        (10, None, True, False),
        (10, 4, True, False),
        (10, 5, True, True),
    ],
)
def test_a_container_with_a_bound_stops_when_it_is_full(
    bound: int | None, entries: int | None, attached: bool, stops: bool
) -> None:
    """One whose tensors have graphs must have filled half of it already."""
    assert stops_when_full(GroupDetail(bound=bound, entries=entries), attached=attached) is stops


def test_a_pause_is_no_longer_than_from_entry_to_entry() -> None:
    data = data_of({3: 1, 13: 2, 23: 3})
    assert data.pauses(33)
    assert not data.pauses(40)
    assert not data_of({3: 3, 23: 23}).pauses(25)


def test_data_is_contradicted_by_the_resident_set_alone() -> None:
    data = data_of({3: 3, 12: 12, 24: 24, 48: 48}, MIB)
    assert judged_data(data, host=[500 * MIB] * 50) == []
    (found,) = judged_data(data, host=[500 * MIB + at * MIB for at in range(50)])
    assert found.proof.certainty == "proven"


# --- what awaits the collector ------------------------------------------------------------------------------


def waiting(*found: tuple[float, int]) -> list[AwaitingCollector]:
    return [AwaitingCollector(at, {"cpu": nbytes}) for at, nbytes in found]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(waiting((3, 0), (13, 3 * MIB)), True, id="a part of the rate"),
        pytest.param(waiting((3, 0), (13, 2 * MIB)), False, id="too small a part"),
        pytest.param(waiting((3, 0), (4003, 6 * MIB)), True, id="what was not collected yet"),
        pytest.param(waiting((3, 0), (13, 0)), False, id="nothing"),
        pytest.param(waiting((3, 9 * MIB)), False, id="one census"),
        pytest.param([], False, id="none"),
    ],
)
def test_garbage_explains_growth_where_there_is_enough_of_it(
    found: list[AwaitingCollector], expected: bool
) -> None:
    assert waits_for_collector(found, "cpu", MIB) is expected


def test_garbage_of_another_device_explains_nothing() -> None:
    assert not waits_for_collector(waiting((3, 0), (13, 99 * MIB)), "cuda:0", MIB)


def grown(seed: int) -> tuple[HolderHistory, WatchedCounter, float]:
    """Three holders of a run, its counter, and how far it has come."""
    chance = random.Random(seed)
    steps = chance.choice([20, 40, 80])
    kinds: list[Callable[[int], int]] = [
        lambda step: step,
        lambda step: min(step, steps // 2),
        lambda step: max(0, step - steps // 2),
        lambda step: step // 5,
        lambda step: round(3 * math.sqrt(step)),
        lambda step: step * step // 40,
        lambda step: step % 11,
    ]
    shapes = {name: chance.choice(kinds) for name in ("one", "two", "three")}
    unseen = chance.choice([0, 0, 1, 2])
    shown = [
        (100 + sum(shape(step) for shape in shapes.values()) + unseen * step) * MIB
        + round(chance.gauss(0, 1) * 64 * KIB)
        for step in range(1, steps + 1)
    ]
    places = sorted(chance.sample(range(3, steps + 1), chance.choice([4, 5, 8])))
    history = holders({place: {name: shape(place) for name, shape in shapes.items()} for place in places})
    return history, counter_of(shown if seed % 6 else [100 * MIB] * steps), float(steps)


def test_all_of_what_is_judged_of_many_runs() -> None:
    rows = []
    for seed in range(60):
        history, counter, now = grown(seed)
        period = 5.0 if seed % 4 == 0 else None
        found = judged(history, counter, period=period, now=now)
        faster = at_counters_rate(list(found.values()), Counters({"cpu": counter}))
        for name, growth in found.items():
            proof = growth.proof
            rows.append([seed, name, proof.certainty, f"{proof.rate:.4g}", proof.intervals, proof.since])
            rows[-1] += [proof.reason, None if proof.stopped is None else f"{proof.stopped:.4g}"]
        rows.append([seed, *(f"{growth.proof.rate:.4g}" for growth in faster)])
    assert_as_kept("judged_holders", rows)
