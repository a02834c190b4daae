"""Which holders account for a counter's growth, and what censuses alone prove."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from memtriage.diagnose.growth.attribution import Rise, attribute
from memtriage.diagnose.growth.evidence import Evidence
from memtriage.model.census import GroupDetail
from memtriage.model.evidence import DataSeen, HolderSeen
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind
from support.judged import judge
from support.observed import BASE, Found, data, held, items, observed

KIB, MIB = 1024, 1024**2
STEPS = 60
CENSUSES = (12, 24, 36, 48)


def rising(rate: float, steps: int = STEPS, since: int = 0) -> list[float]:
    """A counter that rises by so many bytes at each step after one."""
    return [BASE + rate * max(0, at - since) for at in range(1, steps + 1)]


def flat(steps: int = STEPS) -> list[float]:
    return rising(0, steps)


def keeping(rate: float = MIB, number: int = 1, **more: object) -> Callable[[int], list[HolderSeen]]:
    """A list that gets one storage at each step."""
    return lambda at: [held(rate * at, at, number=number, **more)]


def rises(evidence: Evidence) -> list[Rise]:
    return attribute(evidence.main)


def the(evidence: Evidence) -> Rise:
    (rise,) = rises(evidence)
    return rise


def certainty_of(rise: Rise) -> str:
    return "suspected" if rise.reasons else "proven"


# --- a counter that rises -----------------------------------------------------------------------------------


@pytest.mark.parametrize("censuses", [(60, 62, 66, 78), (74, 76), (60, 99, 101)])
def test_what_grows_at_each_evaluation_is_proven_by_censuses_shortly_apart(censuses: Sequence[int]) -> None:
    """One evaluation in a few steps would be a rate that the holder never had."""

    def evaluations(at: int) -> int:
        return MIB * (at // 25)

    counter = [BASE + evaluations(at) for at in range(1, 301)]
    rise = the(observed({"cpu": counter}, lambda at: [held(evaluations(at), at // 25)], censuses))
    assert (certainty_of(rise), rise.share > 0) == ("proven", True)
    assert rise.rate == pytest.approx(MIB / 25, rel=0.05)


@pytest.mark.parametrize("censuses", [(20, 40), CENSUSES])
def test_two_censuses_and_a_rising_counter_prove_growth(censuses: Sequence[int]) -> None:
    rise = the(observed({"cpu": rising(MIB)}, keeping(), censuses))
    assert (certainty_of(rise), rise.share > 0) == ("proven", True)
    assert rise.rate == pytest.approx(MIB)
    assert (rise.since, rise.last) == (censuses[0], censuses[-1])


def test_what_a_holder_lost_when_the_program_had_ended_is_no_end_of_its_growth() -> None:
    censuses = (*CENSUSES, STEPS)
    found = lambda at: [held(MIB * min(at, 48 if at < STEPS else 4), min(at, 48))]  # noqa: E731
    rise = the(observed({"cpu": rising(MIB)}, found, censuses, last={"between": False}))
    assert (certainty_of(rise), rise.last) == ("proven", 48)
    assert rise.rate == pytest.approx(MIB)


def test_many_small_entries_of_one_container_are_judged_together() -> None:
    """State dicts in a list: twenty tensors of each, none of which is a tenth of what the list gets."""
    number_of, kept = 20, items("kept")

    def tensors(at: int) -> list[HolderSeen]:
        keys = [(*kept, PathSegment(SegmentKind.ITEM, f"'{key}'")) for key in range(number_of)]
        sizes = enumerate(keys, 1)
        return [held(MIB * at, at, number=number, anchor=key, path=key) for number, key in sizes]

    evidence = observed({"cpu": rising(number_of * MIB)}, tensors, (20, 40))
    assert [(certainty_of(rise), rise.rate) for rise in rises(evidence)] == [("proven", MIB)] * number_of
    (finding,) = judge(evidence).findings
    assert (finding.certainty, finding.bytes_per_step) == ("proven", number_of * MIB)


@pytest.mark.parametrize("rounding", [0, 4096, 16384])
def test_what_malloc_rounds_up_is_not_the_holders_growth(rounding: int) -> None:
    """The censuses come before a step's storage is kept, the one at the end after that of the last step."""
    censuses, before = (12, 24, STEPS), {12: 1, 24: 1}
    found = lambda at: [held(MIB * (at - before.get(at, 0)), at - before.get(at, 0))]  # noqa: E731
    rise = the(observed({"cpu": rising(MIB + rounding)}, found, censuses, last={"between": False}))
    assert (certainty_of(rise), rise.rate) == ("proven", MIB)


@pytest.mark.parametrize("counters", [{"cpu": rising(MIB)}, {"cuda:0": flat()}])
def test_what_a_holder_got_when_functions_had_returned_is_no_growth(
    counters: dict[str, list[float]],
) -> None:
    """It keeps the model alive, which a variable of the function had until then."""
    censuses, model = (12, 24, 36, STEPS), {STEPS: 8 * MIB}
    evidence = observed(
        counters, lambda at: [held(MIB * at + model.get(at, 0), at)], censuses, last={"between": False}
    )
    assert the(evidence).rate == MIB
    (finding,) = judge(evidence).findings
    assert (finding.certainty, finding.bytes_per_step, finding.bytes) == ("proven", MIB, (STEPS + 8) * MIB)
    assert finding.evidence[0].endswith(
        ": 12.0 MiB, 24.0 MiB, 36.0 MiB, 68.0 MiB at the same place; 48 more storages"
    )


@pytest.mark.parametrize("censuses", [(34, 51), (31, 49)], ids=["one rise more", "one less"])
def test_what_comes_in_single_rises_comes_at_the_rate_of_its_counter(censuses: Sequence[int]) -> None:
    def kept(at: int) -> float:
        return MIB * (at // 10)

    counter = [BASE + kept(at) for at in range(1, 101)]
    rise = the(observed({"cpu": counter}, lambda at: [held(kept(at), at)], censuses))
    assert certainty_of(rise) == "proven"
    assert rise.rate == pytest.approx(MIB / 10, rel=0.05)
    assert rise.own_rate != pytest.approx(MIB / 10, rel=0.05)


def test_an_entry_that_grows_no_more_is_no_part_of_what_its_container_gets() -> None:
    """It grew before the counter began to rise."""
    censuses, kept = (10, 20, 160, 180, 200), items("kept")

    def tensors(at: int) -> list[HolderSeen]:
        sizes = (MIB * min(at, 20), 20 * MIB * max(0, at - 150))
        keys = [(*kept, PathSegment(SegmentKind.ITEM, f"'{number}'")) for number in (1, 2)]
        found = enumerate(zip(sizes, keys, strict=True), 1)
        return [held(size, at, number=n, anchor=key, path=key) for n, (size, key) in found if size]

    evidence = observed({"cpu": rising(20 * MIB, 200, since=150)}, tensors, censuses)
    assert [(certainty_of(rise), rise.rate) for rise in rises(evidence) if rise.share] == [
        ("proven", pytest.approx(20 * MIB))
    ]
    (finding,) = judge(evidence).findings
    assert finding.bytes_per_step == pytest.approx(20 * MIB, rel=0.01)


def test_what_comes_in_irregular_rises_comes_at_the_rate_of_its_counter() -> None:
    """One and four MiB in turns, 4 and 8 steps apart: the mean of so few rises is uncertain."""

    def kept(at: int) -> float:
        return MIB * (5 * (at // 12) + (at % 12 >= 4))

    counter = [BASE + kept(at) for at in range(1, 61)]
    rise = the(observed({"cpu": counter}, lambda at: [held(kept(at), at)], (23, 41)))
    assert certainty_of(rise) == "proven"
    assert rise.own_rate == 10 * MIB / 18
    assert rise.rate == pytest.approx(5 * MIB / 12, rel=0.1)


def test_censuses_over_a_small_part_of_the_growth_do_not_set_its_rate() -> None:
    def kept(at: int) -> float:
        return 9 * MIB * (at // 9)

    counter = [BASE + kept(at) for at in range(1, 301)]
    rise = the(observed({"cpu": counter}, lambda at: [held(kept(at), at)], (10, 19, 32)))
    assert rise.rate == pytest.approx(MIB, rel=0.01)
    assert rise.own_rate == pytest.approx(2 * 9 * MIB / (32 - 10))


def test_growth_whose_end_the_counter_saw_after_the_last_census_is_no_growth() -> None:
    counter = [BASE + MIB * min(at, 36) for at in range(1, STEPS + 1)]
    assert rises(observed({"cpu": counter}, keeping(), (9, 18, 27, 36))) == []


def test_what_ends_with_much_larger_growth_of_its_counter_is_no_growth() -> None:
    """A cache of labels and of what belongs to each, which is full after the last census."""
    full = 200
    counter = [BASE + MIB * min(at, full) for at in range(1, 801)]
    evidence = observed({"heap": counter}, lambda at: [data(64 * min(at, full), 72)], (3, 12, 36, 80, 140))
    assert rises(evidence) == []


def test_censuses_do_not_prove_growth_that_the_counter_saw_end_lately() -> None:
    """The cache is full at step 106 of 120, within the last of four intervals between censuses."""
    full, steps = 106, 120
    counter = [BASE + MIB * min(at, full) for at in range(1, steps + 1)]
    evidence = observed({"cpu": counter}, lambda at: keeping()(min(at, full)), (6, 12, 24, 48, steps))
    assert evidence.main.counters["cpu"].growth.state == "uncertain"
    assert the(evidence).reasons == ("few",)


def test_a_jump_of_the_counter_is_no_growth_of_the_list_that_got_it() -> None:
    """One list gets 64 KiB at each step, the other 100 MiB once."""

    def found(at: int) -> Found:
        once = 2 if at > 40 else 1
        return [
            held(64 * KIB * at, at, number=1),
            held(100 * MIB * once, once, name="other", number=2),
        ]

    counter = [BASE + sum(each.nbytes for each in found(at)) for at in range(1, STEPS + 1)]  # type: ignore[union-attr]
    evidence = observed({"cpu": counter}, found, CENSUSES)
    proven = [rise for rise in rises(evidence) if certainty_of(rise) == "proven"]
    assert [(rise.seen.id, rise.rate) for rise in proven] == [(1, 64 * KIB)]


@pytest.mark.parametrize("of_holder", [True, False])
def test_what_the_heap_rises_by_at_once_counts_if_it_is_its_holders(of_holder: bool) -> None:
    """1 MiB comes at once: a larger table, of which each of the 60 entries has its part, or another's."""
    at_once, entry = MIB, 64 * KIB
    counter = [BASE + entry * at + at_once * (at > 20) for at in range(1, STEPS + 1)]
    entry_bytes = entry + at_once // STEPS * of_holder
    evidence = observed({"heap": counter}, lambda at: [data(at, entry_bytes)], (12, 30, 48))
    assert the(evidence).rate == pytest.approx(entry_bytes, rel=0.02)


@pytest.mark.parametrize("seed", range(12))
def test_a_list_that_is_full_is_not_proven_where_noise_hides_it_from_the_counter(seed: int) -> None:
    """It got 12 entries between two censuses, then 3."""
    noise = random.Random(seed)
    counter = [BASE + MIB * (min(at, 51) + noise.uniform(0, 8)) for at in range(1, STEPS + 1)]
    rise = the(observed({"cpu": counter}, lambda at: keeping()(min(at, 51)), (*CENSUSES, STEPS)))
    assert certainty_of(rise) == "suspected"


def test_one_census_proves_nothing() -> None:
    assert rises(observed({"cpu": rising(MIB)}, keeping(), [20])) == []


def test_two_censuses_prove_nothing_of_a_small_part_of_the_rise() -> None:
    """What else came in one interval is not known: this holder may have grown once."""
    rise = the(observed({"cpu": rising(4 * MIB)}, keeping(MIB), (20, 40)))
    assert (certainty_of(rise), rise.share > 0) == ("suspected", False)


def test_a_list_that_is_emptied_now_and_then_is_not_proven_by_two_censuses() -> None:
    """Within an epoch of ten steps it grows as the counter does, which shows what another keeps of each."""

    def epoch(at: int) -> Found:
        return [held(MIB * (at % 10), at % 10)]

    assert certainty_of(the(observed({"cpu": rising(MIB)}, epoch, (31, 35)))) == "suspected"


def test_two_censuses_prove_what_several_holders_explain_together() -> None:
    def found(at: int) -> Found:
        return [held(MIB * at, at, number=1), held(3 * MIB * at, at, name="other", number=2)]

    both = rises(observed({"cpu": rising(4 * MIB)}, found, (20, 40)))
    assert [(rise.rate, certainty_of(rise), rise.share) for rise in both] == [
        (pytest.approx(3 * MIB), "proven", pytest.approx(0.75)),
        (pytest.approx(MIB), "proven", pytest.approx(0.25)),
    ]


def test_a_holder_that_does_not_keep_up_is_not_proven_by_the_counter() -> None:
    """It grew while the counter was to rise by four times as much, and then no more."""
    sizes = dict(zip(CENSUSES, (0, 20, 20, 21), strict=True))
    rise = the(observed({"cpu": rising(MIB)}, lambda at: [held(MIB * sizes[at], sizes[at])], CENSUSES))
    assert (certainty_of(rise), rise.share > 0) == ("suspected", False)


def test_a_holder_that_the_counter_contradicts_does_not_grow() -> None:
    """Its storages were there before: it only came to know more of them."""
    assert rises(observed({"cpu": flat()}, keeping(), CENSUSES)) == []


def test_a_holder_that_grew_by_more_than_its_counter_is_not_proven_by_it() -> None:
    found = rises(observed({"cpu": rising(MIB / 2)}, keeping(2 * MIB), CENSUSES))
    assert [rise for rise in found if rise.share] == []


def test_growth_begins_where_its_counter_begins_to_rise() -> None:
    def found(at: int) -> Found:
        return [held(MIB * max(0, at - 30), max(0, at - 30))]

    rise = the(observed({"cpu": rising(MIB, since=30)}, found, (10, 20, 30, 40, 50, 60)))
    assert (certainty_of(rise), rise.rate) == ("proven", pytest.approx(MIB))
    assert rise.since == 30


def test_of_accelerating_growth_the_latest_rate_is_known_too() -> None:
    """It adds 2, 4, 6, ... KiB per step: at step n, n * (n + 1) KiB altogether."""
    sizes = {at: KIB * at * (at + 1) for at in range(1, 121)}
    evidence = observed(
        {"cpu": [BASE + size for size in sizes.values()]},
        lambda at: [held(sizes[at], at)],
        (30, 60, 90, 120),
    )
    rise = the(evidence)
    mean = (sizes[120] - sizes[4]) / 116  # the first three readings are left out
    assert certainty_of(rise) == "proven"
    assert rise.rate == pytest.approx(mean, rel=0.05)
    assert rise.recent > 1.3 * rise.rate
    assert rise.recent <= 2 * KIB * 120 * 1.05


def test_a_counter_that_is_read_later_shows_the_rate_since_the_last_census() -> None:
    counter = [BASE + MIB * at + MIB / 2 * max(0, at - 40) for at in range(1, 161)]
    rise = the(observed({"cpu": counter}, keeping(), (10, 20, 30, 40)))
    assert certainty_of(rise) == "proven"
    assert rise.rate == pytest.approx((counter[-1] - counter[3]) / 156, rel=0.05)


def test_mapped_memory_grows_at_its_own_rate_while_pages_of_files_go() -> None:
    counters = {"cpu": flat(), "shared": rising(0.84 * MIB)}
    found = keeping(MIB, detail=GroupDetail(mapped=True))
    rise = the(observed(counters, found, (3, 23, 27, 35, 43)))
    assert certainty_of(rise) == "proven" and rise.rate == MIB


def test_each_counter_proves_what_it_sees() -> None:
    def found(at: int) -> Found:
        return [
            held(MIB * at, at, device="cuda:0", number=1),
            held(MIB * at, at, name="other", number=2),
            held(MIB * at, at, name="queue", number=3, detail=GroupDetail(shared=True)),
        ]

    counters = {"cuda:0": rising(MIB), "cpu": flat(), "shared": rising(MIB)}
    assert {(rise.counter, certainty_of(rise)) for rise in rises(observed(counters, found, CENSUSES))} == {
        ("cuda:0", "proven"),
        ("shared", "proven"),
    }


def test_a_storage_on_a_gpu_takes_a_block_at_least() -> None:
    """A tensor of 300 bytes takes 512 of the allocator."""
    rise = the(
        observed(
            {"cuda:0": rising(512, 400)},
            lambda at: [held(300 * at, at, device="cuda:0", attached=True)],
            (100, 200, 300, 400),
        )
    )
    assert (certainty_of(rise), rise.rate) == ("proven", pytest.approx(512))


# --- without a counter --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("censuses", "certainty"), [((6, 12, 18), "suspected"), ((6, 12, 18, 24), "proven")])
def test_three_intervals_prove_growth_that_no_counter_sees(censuses: Sequence[int], certainty: str) -> None:
    rise = the(observed({}, keeping(), censuses))
    assert (certainty_of(rise), rise.rate) == (certainty, pytest.approx(MIB))
    assert rise.reasons == (() if certainty == "proven" else ("few",))


@pytest.mark.parametrize(("censuses", "certainty"), [(7, "suspected"), (8, "proven")])
def test_five_intervals_prove_what_was_ever_smaller_again(censuses: int, certainty: str) -> None:
    """It is emptied after the second census: as many intervals of growth follow as censuses, less 3."""
    positions = [6 * number for number in range(1, censuses + 1)]

    def found(at: int) -> Found:
        size = at if at <= 12 else at - 12
        return [held(MIB * size, size)]

    rise = the(observed({}, found, positions))
    assert (len(rise.points) - 1, certainty_of(rise)) == (censuses - 3, certainty)


@pytest.mark.parametrize(("until", "certainty"), [(96, "suspected"), (180, "proven")])
def test_what_is_emptied_is_only_suspected_until_it_has_more_than_it_ever_had(
    until: int, certainty: str
) -> None:
    """It is emptied at step 100, and then no more."""

    def found(at: int) -> Found:
        size = at if at < 100 else at - 99
        return [held(MIB * size, size)]

    rise = the(observed({}, found, (40, 95, *range(110, 101 + until, 10))))
    assert certainty_of(rise) == certainty


def test_growth_that_is_too_small_for_its_counter_is_proven_by_censuses() -> None:
    def found(at: int) -> Found:
        return [held(20 * MIB * at, at, number=1), held(MIB * at, at, name="small", number=2)]

    large, small = rises(observed({"cpu": rising(21 * MIB)}, found, (15, 30, 45, 60)))
    assert (certainty_of(large), large.share > 0) == ("proven", True)
    assert (certainty_of(small), small.share > 0, small.rate) == ("proven", False, pytest.approx(MIB))


def test_what_grows_no_more_is_no_growth() -> None:
    assert rises(observed({}, lambda at: [held(MIB * min(at, 24), min(at, 24))], (6, 12, 18, 24, 30))) == []


def test_growth_counts_for_a_quarter_of_the_time_over_which_it_was_seen() -> None:
    """From step 6 to step 46 it was seen to grow: until step 56 it goes on."""
    censuses = (6, 16, 26, 36, 46)
    counter = {"cuda:1": flat(56)}  # another device: it says only where the program is
    assert certainty_of(the(observed(counter, keeping(), censuses))) == "proven"
    aged = the(observed({"cuda:1": flat(57)}, keeping(), censuses))
    assert aged.reasons == ("aged",)


def test_a_list_that_is_emptied_each_epoch_is_no_growth_once_its_counter_says_so() -> None:
    """It was seen in its first epoch only. Each ends with 100 MiB of it, and the next begins with one."""
    teeth = [BASE + MIB * ((step - 1) % 100 + 1) for step in range(1, 401)]
    assert rises(observed({"cpu": teeth}, keeping(), (3, 12, 15, 19, 23))) == []
    rise = the(observed({"cpu": rising(MIB, 400)}, keeping(), (3, 12, 15, 19, 23)))
    assert certainty_of(rise) == "proven"


def test_what_else_rises_after_the_censuses_proves_no_small_part_of_what_they_saw() -> None:
    """Lists of outputs and of labels, emptied each epoch. After the first, its outputs stay as one."""

    def found(at: int) -> list[HolderSeen]:
        return [held(20 * MIB * at, at, number=1), held(MIB * at, at, name="labels", number=2)]

    censuses = (3, 12, 48, 100, 140)
    teeth = [
        BASE + 21 * MIB * ((step - 1) % 150 + 1) + (step > 150) * 150 * 20 * MIB for step in range(1, 401)
    ]
    assert all(each.reasons for each in rises(observed({"cpu": teeth}, found, censuses)))
    both = rises(observed({"cpu": rising(21 * MIB, 400)}, found, censuses))
    assert list(map(certainty_of, both)) == ["proven", "proven"]


def test_what_the_last_census_finds_elsewhere_makes_no_growth_slower() -> None:
    """The function has returned: under the list's name are ten of the forty that came since."""

    def found(at: int) -> list[HolderSeen]:
        here = at if at <= 20 else 30
        return [held(MIB * here, here)]

    counter = {"cpu": rising(MIB, 60)}
    rise = the(observed(counter, found, (5, 10, 15, 20, 60), last={"between": False}))
    assert (certainty_of(rise), rise.rate) == ("proven", pytest.approx(MIB))


def test_what_comes_in_single_rises_has_the_rate_of_its_counter() -> None:
    """40 MiB at the end of each epoch of 40 steps. A census does not count the newest, a variable's own."""
    counter = {"cpu": [BASE + 40 * MIB * (at // 40) for at in range(1, 401)]}
    rise = the(
        observed(counter, lambda at: [held(40 * MIB * (at // 40 - at // 400), at // 40)], (48, 124, 400))
    )
    assert rise.rate == pytest.approx(MIB, rel=0.02)


def test_entries_that_are_replaced_are_only_suspected() -> None:
    found = the(observed({}, keeping(replaced=True), (6, 12, 18, 24)))
    assert found.reasons == ("replaced",)


def test_growth_that_slows_down_is_only_suspected() -> None:
    sizes = {6: 0, 12: 16, 18: 28, 24: 36, 30: 40}
    found = the(observed({}, lambda at: [held(MIB * sizes[at], sizes[at])], sizes))
    assert found.reasons == ("slows",)


# --- what counts as growth ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "grows"),
    [
        pytest.param(keeping(), True, id="a list of tensors"),
        pytest.param(keeping(512), False, id="a log of losses"),
        pytest.param(keeping(513), True, id="more than a log entry each"),
        pytest.param(keeping(512, attached=True), True, id="each leads to a graph"),
        pytest.param(keeping(255, attached=True), False, id="too little"),
        pytest.param(lambda at: [held(MIB * at)], False, id="a longer batch"),
        pytest.param(lambda at: [held(MIB * at, continued=True)], True, id="a tensor that is lengthened"),
        pytest.param(keeping(renewed=True), False, id="a larger graph without an old node"),
        pytest.param(lambda at: [held(0, 0, kept=600 * at, nodes=at)], True, id="nodes alone"),
        pytest.param(lambda at: [held(MIB * at, 60 - at)], False, id="fewer but larger"),
    ],
)
def test_growth_is_what_may_never_end(found: Callable[[int], Found], grows: bool) -> None:
    assert bool(rises(observed({}, found, (6, 12, 18, 24)))) is grows


def test_data_grows_by_its_entries() -> None:
    rise = the(observed({}, lambda at: [data(at, 10 * KIB)], (6, 12, 18, 24)))
    assert (rise.counter, certainty_of(rise), rise.rate) == ("host", "proven", pytest.approx(10 * KIB))


def test_data_has_its_name_and_its_size_from_while_the_program_ran() -> None:
    def found(at: int) -> Found:
        ended = at == 24
        return [data(at, 10 * (10 if ended else KIB), name="buffer" if ended else "rows")]

    rise = the(observed({}, found, (6, 12, 18, 24), last={"between": False}))
    assert isinstance(rise.seen, DataSeen)
    assert (rise.seen.path, rise.seen.entries, rise.rate) == (items("rows"), 24, pytest.approx(10 * KIB))


def test_little_data_is_a_log() -> None:
    assert rises(observed({}, lambda at: [data(at, 4095)], (6, 12, 18, 24))) == []


def test_a_rising_resident_set_proves_data_by_two_censuses() -> None:
    rise = the(observed({"host": rising(MIB)}, lambda at: [data(at, MIB)], (20, 40)))
    assert (rise.counter, certainty_of(rise), rise.share > 0) == ("host", "proven", True)


@pytest.mark.parametrize("rises_seen", [3, 4])
def test_a_counter_that_sees_a_small_part_of_data_makes_it_no_less_certain(rises_seen: int) -> None:
    """The table of a dict is from malloc, and its small entries are not."""
    when = (12, 25, 44, 58)[:rises_seen]
    tables = [BASE + 400 * KIB * sum(at >= each for each in when) for at in range(1, 61)]
    rise = the(observed({"cpu": tables}, lambda at: [data(100 * at, 700)], (6, 18, 30, 45, 60)))
    assert (certainty_of(rise), rise.rate) == ("proven", pytest.approx(70_000))


def test_the_fastest_is_first() -> None:
    def found(at: int) -> Found:
        return [held(rate * MIB * at, at, name=f"n{rate}", number=rate) for rate in (2, 7, 4)]

    assert [round(rise.rate / MIB) for rise in rises(observed({}, found, (6, 12, 18, 24)))] == [7, 4, 2]


def test_entries_of_a_container_within_another_are_counted_once() -> None:
    """A dict of every ten steps in a dict: an entry of the outer one includes those of the inner one."""

    def found(at: int) -> Found:
        outer = data(1 + at // 10, 1_000_000, number=1)
        inner = data(at % 10 + 1, 100_000, number=2)
        inner.path = (*outer.path, ANY_ITEM)
        return [outer, inner]

    (rise,) = attribute(observed({"host": [BASE] * 60}, found, (12, 15, 18, 59)).main)
    assert rise.seen.id == 1
    assert rise.own_rate == pytest.approx((6 - 2) * 1_000_000 / (59 - 18))
