"""The search for blocks to allocate first: it helps where it can, and under other circumstances."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from memtriage.allocator.priming import Circumstance, PackingTrial, most_alive
from memtriage.allocator.priming_search import POLICY, POOLS, Apart, choose
from memtriage.allocator.requests import FREE, Request, Requests, StepRequests, repeated
from memtriage.allocator.settings import parse_conf

MIB = 1 << 20
TORCH = parse_conf("", "2.11")
TRIAL = PackingTrial(TORCH)
QUICK = replace(POLICY, requests=200_000, patience=60_000, grid=60)


def growing_activations(steps: int = 6) -> Requests:
    """Activations that are freed in their order, and a large block that only merged memory has room for."""
    blocks: list[StepRequests] = []
    number = 100
    for _ in range(steps):
        made: list[Request] = []
        small = [(number + place, (12 + place) * MIB) for place in range(20)]
        made += small
        made += [(block, FREE) for block, _ in small]
        made += [(number + 50, 300 * MIB), (number + 50, FREE)]
        blocks.append(StepRequests(tuple(made), forward=20))
        number += 100
    return Requests(((0, 40 * MIB),), tuple(blocks))


def test_blocks_help_where_memory_never_merges() -> None:
    requests = growing_activations()
    before = TRIAL.run(requests.all(), ())
    choice = choose(requests, TORCH, QUICK)
    assert choice.blocks == tuple(sorted(choice.blocks, reverse=True))
    after = TRIAL.run(repeated(requests, 40).all(), choice.blocks)
    assert before is not None and after is not None
    assert after < 0.7 * before
    assert (choice.checks[0].before, choice.checks[0].after) == (before, after)
    assert all(check.after <= check.before * 1.005 for check in choice.checks)


def large_at_both_ends(steps: int = 5) -> Requests:
    """Large activations of the first layers, whose backward pass comes last, among all gradients."""
    chance = random.Random(2)
    layers = [[chance.choice((24, 94, 12, 48, 31)) for _ in range(6)] for _ in range(10)]
    first = (250, 500, 500)
    made: list[StepRequests] = []
    number = 100
    for _ in range(steps):
        requests: list[Request] = []
        live: list[int] = []
        gradients: list[int] = []
        for size in (*first, *(size for layer in layers for size in layer)):
            number += 1
            requests.append((number, size * MIB))
            live.append(number)
        forward = len(requests)
        while len(live) > len(first):
            for size in (chance.choice((24, 94)), 9, 9):
                number += 1
                requests.append((number, size * MIB))
            requests += [(live.pop(), FREE), (number - 2, FREE)]
            gradients += [number - 1, number]
        for size in reversed(first):
            number += 2
            requests += [(number - 1, size * MIB), (number, size * MIB)]
            requests += [(live.pop(), FREE), (number - 1, FREE), (number, FREE)]
        requests += [(block, FREE) for block in gradients]
        made.append(StepRequests(tuple(requests), forward))
    return Requests(((0, 60 * MIB),), tuple(made))


def test_large_blocks_stay_whole_for_what_comes_last() -> None:
    requests = large_at_both_ends()
    policy = replace(POLICY, requests=400_000, patience=100_000, grid=60)
    without, choice = (choose(requests, TORCH, replace(policy, divided=divided)) for divided in (0.0, 1.0))
    assert choice.checks[0].after < 0.9 * without.checks[0].after
    assert all(check.after <= check.before * 1.005 for check in choice.checks)


def all_of_it_again(steps: int = 5) -> Requests:
    """Ten blocks, and one as large as all of them."""
    made: list[StepRequests] = []
    for step in range(1, steps + 1):
        small = range(100 * step, 100 * step + 10)
        requests: list[Request] = [(block, 100 * MIB) for block in small]
        requests += [(block, FREE) for block in small]
        requests += [(100 * step + 50, 1000 * MIB), (100 * step + 50, FREE)]
        made.append(StepRequests(tuple(requests), forward=10))
    return Requests(((0, 40 * MIB),), tuple(made))


@pytest.mark.parametrize(("room", "bears"), [(0.0, False), (0.005, True)])
def test_a_choice_has_room_for_a_little_that_was_not_predicted(room: float, bears: bool) -> None:
    requests = all_of_it_again()
    nothing_else = (Circumstance(),)
    policy = replace(QUICK, room=room, grid=21, searched_under=nothing_else, checked_under=nothing_else)
    choice = choose(requests, TORCH, policy)
    assert choice.checks[0].after <= 1.01 * 1040 * MIB
    more = TRIAL.run(requests.all(), choice.blocks, under=Circumstance(unpredicted=4 * MIB))
    assert more is not None
    assert (more < 1100 * MIB) == bears


def test_a_search_gives_the_same_blocks_each_time() -> None:
    assert choose(growing_activations(), TORCH, QUICK) == choose(growing_activations(), TORCH, QUICK)


def test_nothing_is_chosen_where_nothing_can_be_gained() -> None:
    one = Requests(
        ((0, 40 * MIB),), (StepRequests(((1, 64 * MIB), (1, FREE))), StepRequests(((2, 64 * MIB), (2, FREE))))
    )
    choice = choose(one, TORCH, QUICK)
    assert choice.blocks == ()
    assert all(check.before == check.after for check in choice.checks)


def test_a_program_without_large_blocks_needs_none() -> None:
    assert choose(Requests(()), TORCH, QUICK).blocks == ()


def test_with_convolutions_a_choice_must_bear_other_workspaces() -> None:
    requests = replace(growing_activations(), convolves=True)
    choice = choose(requests, TORCH, QUICK)
    (check,) = [check for check in choice.checks if check.name == "other workspaces at the peak"]
    assert choice.blocks
    assert check.before == choice.checks[1].before - 8 * MIB  # without them
    large = replace(QUICK, workspace=0.9)
    rejecting = choose(requests, TORCH, large)
    assert rejecting.blocks == () and rejecting.rejected > 0
    assert choose(growing_activations(), TORCH, large).blocks


def test_a_choice_that_reserves_a_little_less_does_not_help() -> None:
    requests = growing_activations()
    assert choose(requests, TORCH, replace(QUICK, least_gain=0.3)).blocks == (472 * MIB,)
    assert choose(requests, TORCH, replace(QUICK, least_gain=0.5)).blocks == ()


def test_a_recording_without_steps_is_checked_as_it_is() -> None:
    choice = choose(Requests(growing_activations(2).all()), TORCH, QUICK)
    assert [check.name for check in choice.checks][:2] == ["as recorded", "the usual addresses, 8 MiB more"]
    assert len(choice.checks) == len(QUICK.checked_under)


def test_a_limit_on_memory_does_not_end_the_search() -> None:
    limited = msgspec.structs.replace(TORCH, memory_fraction=0.001)
    assert choose(growing_activations(), limited, QUICK).blocks == (472 * MIB,)


NO_BLOCKS = replace(
    QUICK,
    requests=0,
    more_requests=0,
    searched_under=(Circumstance(),),
    checked_under=(Circumstance(),),
)
"""Settings alone are tried."""
LARGER = "large_segment_size_mb:128"


def middling() -> Requests:
    """Blocks of 6 MiB: three of them fill 18 of the 20 MiB of a segment."""
    step: list[Request] = [(number, 6 * MIB) for number in range(100)]
    step += [(number, FREE) for number in range(100)]
    again = [(number + 100, size) for number, size in step]
    return Requests(((1000, 40 * MIB),), (StepRequests(tuple(step)), StepRequests(tuple(again))))


def test_settings_that_save_more_are_chosen() -> None:
    choice = choose(middling(), TORCH, NO_BLOCKS, {LARGER: parse_conf(LARGER, "2.11")})
    assert (choice.blocks, choice.settings) == ((), LARGER)
    own, larger = choice.tried
    assert (own.name, own.before, own.after) == ("", 720 * MIB, 720 * MIB)  # 40, and 34 segments of 20
    assert (larger.name, larger.before, larger.after) == (LARGER, 680 * MIB, 680 * MIB)  # 40, and 5 of 128


def test_settings_that_save_nothing_are_not() -> None:
    choice = choose(middling(), TORCH, NO_BLOCKS, {LARGER: parse_conf("max_split_size_mb:1024", "2.11")})
    assert choice.settings == ""
    assert [(each.before, each.after) for each in choice.tried] == [(720 * MIB, 720 * MIB)] * 2


def states_among_gradients(*, apart: bool = False) -> Requests:
    """Gradients that are all alive when the states are made, and then go: where states take what is left
    between them, one large block finds no room any more."""
    steps: list[StepRequests] = []
    for number in range(4):
        first = 1000 * (number + 1)
        made: list[Request] = []
        for place in range(12):
            made += [(first + 2 * place, 36 * MIB), (first + 2 * place + 1, 24 * MIB)]
        made += [(first + 2 * place, FREE) for place in range(12)]
        if number == 0 and not apart:
            made += [(place, 30 * MIB) for place in range(1, 13)]
        made += [(first + 2 * place + 1, FREE) for place in range(12)]
        made += [(first + 100, 700 * MIB), (first + 100, FREE)]
        steps.append(StepRequests(tuple(made), forward=24))
    return Requests(((0, 40 * MIB),), tuple(steps))


def test_states_get_a_pool_where_that_saves_more() -> None:
    requests, size = states_among_gradients(), 12 * 30 * MIB
    apart = Apart(states_among_gradients(apart=True), size)
    choice = choose(requests, TORCH, QUICK, apart=apart)
    own, pooled, *_ = choice.tried
    assert (choice.apart, choice.settings, pooled.name) == (True, "", POOLS)
    assert pooled.after <= own.after - 0.02 * own.before
    whole = repeated(requests, 40).all()
    assert choice.without_pools == TRIAL.run(whole, choice.blocks)
    rest = TRIAL.run(repeated(apart.requests, 40).all(), choice.blocks)
    assert rest is not None
    assert choice.checks[0].after == pooled.after == rest + size
    assert choice.checks[0].before == own.before == TRIAL.run(repeated(requests, 40).all(), ())
    assert all(check.after <= 1.005 * check.before for check in choice.checks)


def test_a_pool_that_needs_more_than_it_saves_is_not_made() -> None:
    requests = states_among_gradients()
    choice = choose(requests, TORCH, QUICK, apart=Apart(states_among_gradients(apart=True), 2 << 30))
    assert not choice.apart
    assert choice.tried[-1].name == POOLS
    assert choice.tried[-1].after == choice.checks[0].before


def test_other_settings_are_not_tried_where_blocks_pack_closely() -> None:
    choice = choose(middling(), TORCH, replace(QUICK, near=0.1), {LARGER: parse_conf(LARGER, "2.11")})
    assert choice.blocks and choice.settings == ""
    assert [each.name for each in choice.tried] == [""]


def test_the_most_blocks_of_a_size_that_are_alive_at_once() -> None:
    large, odd, small = 32 * MIB, 31 * MIB + 5, 9 * MIB
    requests = [(0, large), (1, odd), (2, small), (0, FREE), (3, large), (2, FREE), (4, 64 * MIB), (4, FREE)]
    assert most_alive(requests) == {large: 2, 64 * MIB: 1}
    assert most_alive([]) == {}
