"""Holders from census to census: the same object or another one, more of it or only other content."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.history import POLICY, HeldSize, HolderHistory, Holding, accumulates
from memtriage.diagnose.growth.holders import growths
from memtriage.model.census import HolderGroup
from memtriage.model.paths import PathSegment, SegmentKind, in_words
from support.censuses import group, point
from support.paths import named

KIB = 1024
MIB = 1024 * KIB
HEAD = b"\1\2\3\4" * 16
SEEN = ("cpu", named("seen"))


def size(position: float, nbytes: int, count: int, nodes: int = 0, head: bytes | None = None) -> HeldSize:
    return HeldSize(position, nbytes, 600 * nodes, count, nodes, head=head)


def growing(history: HolderHistory, rises: int = 1) -> dict[str, Holding]:
    """What grew over so many intervals in a row, up to the last census."""
    found = [each for each in history.growing() if len(each.rising()) > rises]
    return {in_words(each.group.anchor): each for each in found}


def history_of(sizes: dict[float, int], *, name: str = "losses", token: int = 1) -> HolderHistory:
    """A holder's MiB, each a storage, by position."""
    made = HolderHistory()
    for at, count in sizes.items():
        made.add(point(at, group(name, count * MIB, count, token=token)))
    return made


def test_nodes_of_what_is_on_a_gpu_are_followed_on_the_host() -> None:
    history = HolderHistory()
    for at in (3, 6, 8):
        graph = group("losses[*]", 4 * at, at, token=1, device="cuda:0", nodes=60 * at, kept=50 * KIB * at)
        history.add(point(at, graph))
    by_device = {each.group.device: each for each in history.growing()}
    assert [each.nbytes for each in by_device["cpu"].sizes] == [50 * KIB * at for at in (3, 6, 8)]
    assert by_device["cpu"].group.count == 0


# --- more of it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "attached", "expected"),
    [
        pytest.param(size(0, 0, 0), size(4, 4 * MIB, 4), False, True, id="a list of tensors"),
        pytest.param(size(0, 0, 0), size(4, 4 * 255, 1), False, False, id="too little"),
        pytest.param(size(0, 0, 0), size(100, 100 * 512, 100), False, False, id="detached losses on CUDA"),
        pytest.param(size(0, 0, 0), size(100, 100 * 513, 100), False, True, id="more than a log entry each"),
        pytest.param(size(0, 0, 0), size(100, 100 * 512, 100), True, True, id="each leads to a graph"),
        pytest.param(size(0, 0, 0), size(9, 0, 0, nodes=9), True, True, id="nodes alone"),
        pytest.param(size(0, MIB, 1), size(4, 9 * MIB, 1), False, False, id="a longer batch"),
        pytest.param(size(0, MIB, 3), size(4, 9 * MIB, 2), False, False, id="fewer but larger"),
        pytest.param(size(0, MIB, 1), size(4, MIB, 1), False, False, id="as before"),
    ],
)
def test_accumulation_is_more_storages_or_nodes_than_a_log(
    before: HeldSize, after: HeldSize, attached: bool, expected: bool
) -> None:
    assert accumulates(before, after, attached=attached) is expected


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ((HEAD, HEAD), True),
        ((HEAD, b"\7" * 64), False),  # a batch that is longer this time
        ((b"\0" * 64, b"\0" * 64), False),  # zeros prove nothing
        ((HEAD, None), False),
        ((None, None), False),
    ],
)
def test_a_tensor_made_anew_and_longer_begins_as_before(
    heads: tuple[bytes | None, bytes | None], expected: bool
) -> None:
    before, after = size(0, MIB, 1, head=heads[0]), size(4, 2 * MIB, 1, head=heads[1])
    assert accumulates(before, after, attached=False) is expected


def test_a_batch_that_is_longer_three_times_is_none_that_grows() -> None:
    history = HolderHistory()
    for at in (3, 12, 14, 20):
        history.add(point(at, group("seen", at * MIB, token=1), heads={SEEN: bytes([at]) * 64}))
    assert growing(history) == {}


def test_lengthened_tensor_grows_though_storages_are_new() -> None:
    history = HolderHistory()
    for at in (3, 12, 14, 20):
        history.add(point(at, group("seen", at * MIB, witnesses=[1000 + at]), heads={SEEN: HEAD}))
    (seen,) = growing(history, 3).values()
    assert seen.lengthens


def test_tensor_lengthened_at_its_beginning_ends_as_before() -> None:
    history = HolderHistory()
    for at in (3, 12, 14, 20):
        made = group("seen", at * MIB, witnesses=[1000 + at])
        history.add(point(at, made, heads={SEEN: bytes([at]) * 64}, tails={SEEN: HEAD}))
    (seen,) = growing(history, 3).values()
    assert seen.lengthens and not seen.swells


@pytest.mark.parametrize(
    ("heads", "nodes", "swells"),
    [
        pytest.param([b"\1", b"\2", b"\3"], (0, 0, 0), True, id="a batch that is longer each time"),
        pytest.param([b"\1", b"\1", b"\1"], (0, 0, 0), False, id="a tensor that is lengthened"),
        pytest.param([b"\0", b"\0", b"\0"], (0, 0, 0), False, id="zeros"),
        pytest.param([b"", b"", b""], (0, 0, 0), False, id="unread"),
        pytest.param([b"", b"", b""], (9, 9, 9), True, id="the graph of a longer batch"),
        pytest.param([b"", b"", b""], (8, 9, 10), False, id="a longer graph"),
    ],
)
def test_what_is_replaced_by_larger_content_swells(
    heads: list[bytes], nodes: tuple[int, ...], swells: bool
) -> None:
    history = HolderHistory()
    for at, head, count in zip((3, 12, 14), heads, nodes, strict=True):
        history.add(point(at, group("seen", at * MIB, token=1, nodes=count), heads={SEEN: head * 64}))
    assert next(iter(history)).swells is swells


def test_more_storages_are_no_lengthening() -> None:
    (holding,) = growing(history_of({3: 3, 12: 12})).values()
    assert not holding.lengthens


def test_what_kept_less_in_between_fell() -> None:
    assert next(iter(history_of({3: 4, 12: 2, 14: 6}))).fell
    assert not next(iter(history_of({3: 4, 12: 4, 14: 6}))).fell


def test_holder_rate_is_over_the_censuses_since_a_position() -> None:
    (holding,) = history_of({3: 4, 13: 4, 23: 24})
    assert holding.rate(3) == holding.rate(13) == MIB
    assert holding.rate(14) == 2 * MIB
    assert holding.rate(24) == 0
    assert holding.rate(3, block=2 * MIB) == 2 * MIB
    assert holding.mean_rate == MIB
    (once,) = history_of({3: 4})
    assert once.mean_rate == 0


@pytest.mark.parametrize(("each", "nodes", "logs"), [(512, 0, True), (513, 0, False), (4, 1, False)])
def test_small_storages_without_a_graph_are_a_log(each: int, nodes: int, logs: bool) -> None:
    history = HolderHistory()
    history.add(point(3, group("losses[*]", 10 * each, 10, nodes=nodes)))
    assert next(iter(history)).logs is logs


def test_a_log_that_keeps_large_entries_now_is_none() -> None:
    history = HolderHistory()
    for at, each in ((3, 512), (4, 4096)):
        history.add(point(at, group("losses[*]", 10 * each, 10)))
    assert not next(iter(history)).logs


# --- the row of censuses ------------------------------------------------------------------------------------


def test_growth_counts_from_the_last_census_without_it() -> None:
    history = history_of({3: 4, 12: 4, 48: 4, 60: 8, 64: 9, 70: 12})
    (holding,) = growing(history, 3).values()
    assert [each.position for each in holding.rising()] == [48, 60, 64, 70]


def test_what_has_filled_grows_no_more() -> None:
    assert growing(history_of({3: 3, 12: 12, 14: 14, 20: 14})) == {}


def test_a_census_that_follows_soon_proves_no_stop() -> None:
    """An entry comes every five positions."""
    history = history_of({40: 8, 88: 17, 176: 35, 180: 36, 360: 72, 364: 72})
    (holding,) = growing(history, 3).values()
    assert holding.rising()[0].position == 40
    assert growing(history_of({40: 8, 88: 17, 176: 35, 360: 35})) == {}


def test_what_is_emptied_now_and_then_grows_from_there() -> None:
    (holding,) = growing(history_of({3: 3, 12: 12, 14: 1, 20: 7})).values()
    assert len(holding.rising()) == 2


def test_periodic_growth_is_compared_over_whole_periods() -> None:
    history = HolderHistory()
    for at in (150, 160, 250, 260, 350, 360, 450):
        history.add(point(at, group("losses", at // 100 * MIB, at // 100, token=1)))
    (holding,) = history
    assert [each.position for each in holding.rising(100)] == [150, 250, 350, 450]


def test_a_census_within_a_period_hides_no_periodic_growth() -> None:
    history = history_of({150: 1, 250: 2, 350: 3, 550: 5, 580: 5})
    (holding,) = history.growing(100)
    assert [each.position for each in holding.rising(100)] == [150, 250, 350, 580]


def test_a_path_that_grew_most_stands_for_the_holder() -> None:
    saved, context = (*named("losses"), *named("saved")), (*named("losses"), *named("context"))
    history = HolderHistory()
    history.add(point(3, group("losses", 1100, 4, token=1, by_path={saved: 1000, context: 100})))
    history.add(point(4, group("losses", 2100, 6, token=1, by_path={saved: 1050, context: 1050})))
    (holding,) = growing(history).values()
    assert holding.path == context


def test_nodes_are_host_memory() -> None:
    history = HolderHistory()
    for at in (3, 12):
        history.add(point(at, group("losses", 0, 0, token=1, nodes=at, kept=600 * at)))
    (holding,) = growing(history).values()
    assert [each.nbytes for each in holding.sizes] == [1800, 7200]
    gpu = HolderHistory()
    gpu.add(point(3, group("losses", MIB, 1, token=1, device="cuda:0", nodes=5, kept=3000)))
    assert {each.group.device: each.sizes[-1].nbytes for each in gpu} == {"cuda:0": MIB, "cpu": 3000}


def test_the_largest_growth_comes_first() -> None:
    history = HolderHistory()
    for at in (3, 12):
        base = group("base", 50 * MIB, 1, witnesses=[5])
        slow = group("slow", at * MIB, at, witnesses=[1, 2])
        fast = group("fast", 3 * at * MIB, at, witnesses=[3, 4])
        history.add(point(at, base, slow, fast))
    assert list(growing(history)) == ["fast", "slow"]


def test_only_so_many_censuses_are_remembered() -> None:
    (holding,) = growing(history_of({float(at): at for at in range(1, 200)})).values()
    assert len(holding.sizes) == POLICY.censuses
    assert holding.sizes[-1].position == 199


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_a_row_of_growth_is_the_rise_up_to_the_last_census(counts: list[int]) -> None:
    history = history_of({float(at): count for at, count in enumerate(counts)})
    (holding,) = history
    rising = [round(each.position) for each in holding.rising()]
    assert rising == list(range(rising[0], len(counts)))
    values = [counts[at] for at in rising]
    assert all(a < b for a, b in pairwise(values))
    assert rising[0] == 0 or counts[rising[0] - 1] >= values[0]


# --- the same object ----------------------------------------------------------------------------------------


def test_a_list_that_is_reached_by_another_path_is_the_same() -> None:
    history = history_of({3: 3, 12: 12}, name="losses[*]")
    history.add(point(14, group("trainer.losses[*]", 14 * MIB, 14, token=1)))
    history.add(point(20, group("trainer.losses[*]", 20 * MIB, 20, token=1)))
    assert list(growing(history, 3)) == ["trainer.losses[*]"]


def test_other_variables_of_one_module_are_not_one_another() -> None:
    """They share their holder, the module's namespace."""
    history = HolderHistory()
    for at in (3, 12, 14, 20):
        history.add(point(at, group(f"batch_{at}", at * MIB, at, token=1)))
    assert growing(history) == {}


def test_one_holder_goes_on_in_one_place_only() -> None:
    history = history_of({3: 3, 12: 12}, name="losses[*]")
    twice = [group(name, 14 * MIB, 14, token=1) for name in ("a.losses[*]", "b.losses[*]")]
    history.add(point(14, *twice))
    assert list(growing(history, 2)) == ["a.losses[*]"]


def test_a_holder_of_several_objects_goes_on_in_one_place_only() -> None:
    """Layers are being built: what one path led to is reached by two later, and by others at the end."""
    history = HolderHistory()
    for at in (3, 12):
        layers = group("layers[*]", at * MIB, at, token=1)
        layers.holders[2] = 0
        history.add(point(at, layers))
    for at, names, between in ((14, "ab", True), (20, "cd", False)):
        parts = (group(f"{name}.layers[*]", at * MIB, at, token=1 + names.index(name)) for name in names)
        history.add(point(at, *parts), between=between)
        assert list(growing(history, 2)) == ["a.layers[*]"]
    (layers_of_a,) = growing(history, 2).values()
    assert [each.position for each in layers_of_a.sizes] == [3, 12, 14, 20]


@pytest.mark.parametrize(("oldest", "same"), [((7, 7, 7), True), ((7, 30, 60), False)])
def test_a_graph_that_keeps_its_oldest_node_is_the_same(oldest: tuple[int, ...], same: bool) -> None:
    history = HolderHistory()
    for number, (at, first) in enumerate(zip((3, 6, 9), oldest, strict=True)):
        # A total in a dict: its tensor is another one at each step, and nothing else tells the dict.
        total = group("totals", 4, token=1 + number, witnesses=[at], nodes=20 * at, kept=12 * KIB * at)
        history.add(point(at, msgspec.structs.replace(total, made=(first, 100 * at))))
    grown = [each.nbytes for holding in history.growing() for each in holding.sizes]
    assert grown == ([4 + 12 * KIB * at for at in (3, 6, 9)] if same else [])


def test_a_list_made_at_each_call_is_another_one() -> None:
    history = HolderHistory()
    for number, at in enumerate((3, 12, 14, 20)):
        made = [1000 * at + each for each in range(at)]
        history.add(point(at, group("outputs", at * MIB, at, token=1 + number, witnesses=made)))
    assert growing(history) == {}


def test_container_rebuilt_with_old_entries_is_the_same() -> None:
    history = HolderHistory()
    for number, at in enumerate((3, 5, 7, 9)):  # `losses = losses + [loss]`
        kept = range(1, 1 + at)
        history.add(point(at, group("losses", at * MIB, at, token=1 + number, witnesses=kept)))
    assert list(growing(history, 3)) == ["losses"]


def replaced(entries: bool) -> HolderHistory:
    """One holder that has more storages at each census, and other ones each time."""
    history = HolderHistory()
    for at in (3, 12, 14, 20):
        made = [1000 * at + each for each in range(at)]
        history.add(
            point(at, group("kept[*]", at * MIB, at, token=1, witnesses=made, entries=at if entries else 1))
        )
    return history


def test_variable_with_other_storages_is_no_leak() -> None:
    assert growing(replaced(entries=False)) == {}


def test_queue_whose_entries_move_on_is_followed() -> None:
    (holding,) = growing(replaced(entries=True), 3).values()
    assert [each.replaced for each in holding.rising()] == [False, True, True, True]


def test_half_of_its_storages_must_have_survived() -> None:
    for survived, same in ((5, True), (4, False)):
        history = HolderHistory()
        history.add(point(3, group("pool", 10 * MIB, 10, witnesses=range(1, 11))))
        left = [*range(1, 1 + survived), *range(100, 120 - survived)]
        history.add(point(12, group("pool", 20 * MIB, 20, witnesses=left)))
        assert bool(growing(history)) is same


def test_nodes_without_storages_are_known_by_their_place() -> None:
    history = HolderHistory()
    for at in (3, 12, 14):
        history.add(point(at, group("nodes", 0, 0, nodes=at, kept=600 * at)))
    assert list(growing(history, 2)) == ["nodes"]


@pytest.mark.parametrize("storages", [0, 1])
@pytest.mark.parametrize(("oldest", "grows"), [(5, True), (None, False)])
def test_longer_graph_grows_if_old_nodes_are_in_it(oldest: int | None, storages: int, grows: bool) -> None:
    history = HolderHistory()
    for at in (3, 12, 14):
        made = (oldest or 100 * at, 100 * at + at)
        out = group("out", storages, storages, token=1, nodes=at, kept=600 * at, witnesses=[at] * storages)
        history.add(point(at, msgspec.structs.replace(out, made=made)))
    assert bool(growing(history, 2)) is grows
    assert next(iter(history)).swells is not grows


def test_devices_are_told_apart() -> None:
    history = history_of({3: 3, 12: 12})
    history.add(point(14, group("losses", 14 * MIB, 14, token=1, device="cuda:0")))
    assert growing(history) == {}


def test_what_partial_censuses_leave_out_is_not_compared() -> None:
    anchor = (PathSegment(SegmentKind.NOT_SEARCHED, "the rest"),)
    history = HolderHistory()
    for at in (3, 12):
        unsearched = group("rest", at * MIB, at, token=1)
        unsearched.anchor = anchor
        history.add(point(at, unsearched))
    assert list(history) == []


# --- the end of the program, and the middle of a step -------------------------------------------------------


@pytest.mark.parametrize("left", [0, 2, 14])
def test_what_is_gone_or_no_more_keeps_what_it_showed_before(left: int) -> None:
    history = history_of({3: 3, 12: 12, 14: 14})
    history.add(point(20, *([group("losses", left * MIB, left, token=1)] if left else [])), between=False)
    (holding,) = growing(history, 2).values()
    assert [each.position for each in holding.sizes] == [3, 12, 14]


def test_what_grew_on_until_the_end_shows_it() -> None:
    history = history_of({3: 3, 12: 12, 14: 14})
    history.add(point(20, group("losses", 20 * MIB, 20, token=1)), between=False)
    assert list(growing(history, 3)) == ["losses"]


@pytest.mark.parametrize(("now", "positions"), [(20, [3, 12, 14, 20]), (14, [3, 12, 14])])
def test_what_another_path_leads_to_at_the_end_keeps_its_own(now: int, positions: list[int]) -> None:
    """Functions have returned since: their variables are in garbage, or only an exception leads to them."""
    history = history_of({3: 3, 12: 12, 14: 14}, name="main.losses[*]")
    history.add(point(20, group("garbage.losses[*]", now * MIB, now, token=1)), between=False)
    (name,) = growing(history, 2)
    assert name == "main.losses[*]"
    assert [each.position for each in growing(history, 2)[name].sizes] == positions
    assert list(history) == list(growing(history, 2).values())


@pytest.mark.parametrize(
    ("end", "left", "stopped"),
    [
        (60, 12, True),
        (60, 11, True),  # something else of it is gone
        (20, 12, False),  # not three times as long ago as two censuses are apart: it may be a pause
        (60, 2, False),  # emptied after training
        (60, 0, False),
        (60, 60, False),
    ],
)
def test_what_keeps_no_more_long_after_the_last_census_has_stopped(
    end: int, left: int, stopped: bool
) -> None:
    def losses(count: int) -> HolderGroup:
        return group("losses", count * MIB, count, token=1, witnesses=frozenset(range(12 - count, 12)))

    history = HolderHistory()
    for at in (3, 6, 9, 12):
        history.add(point(at, losses(at)))
    history.add(point(end, *([losses(left)] if left else [])), between=False)
    grown = growths(history.growing(), lambda holding: "cpu", lambda counter, rate, since: False)
    assert (not grown) is stopped


def test_what_is_gone_in_the_middle_of_a_run_is_forgotten() -> None:
    history = history_of({3: 3, 12: 12, 14: 14})
    history.add(point(20))
    assert list(history) == []


@pytest.mark.parametrize("between", [True, False])
def test_what_a_step_adds_after_its_mark_is_no_rate(between: bool) -> None:
    """At the end the last step has added it, too: one more than was there at its mark."""
    history = history_of({at: at - 1 for at in (3, 6, 9, 12)})
    history.add(point(16, group("losses", 16 * MIB, 16, token=1)), between=between)
    (growth,) = growths(history.growing(), lambda holding: "cpu", lambda counter, rate, since: False)
    assert growth.proof.certainty == "proven"
    assert (growth.proof.rate == MIB) is not between


def test_far_from_the_census_before_a_part_of_a_step_makes_no_difference() -> None:
    """The rate is that of the whole run, not of its first steps."""
    history = history_of({3: 3, 6: 6, 9: 8, 12: 10})
    history.add(point(112, group("losses", 112 * MIB, 112, token=1)), between=False)
    (growth,) = growths(history.growing(), lambda holding: "cpu", lambda counter, rate, since: False)
    assert growth.proof.rate == pytest.approx(MIB, rel=0.05)


def test_what_is_still_at_its_place_is_not_found_again_elsewhere() -> None:
    history = history_of({3: 3, 12: 12}, name="losses[*]")
    both = [group(name, 14 * MIB, 14, token=1) for name in ("trainer.losses[*]", "losses[*]")]
    history.add(point(14, *both))
    assert list(growing(history, 2)) == ["losses[*]"]
