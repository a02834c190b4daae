"""Steps of a program, played again, in other orders, with shorter batches and with evaluations."""

from __future__ import annotations

from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.requests import (
    EMPTIED,
    FREE,
    RequestLog,
    Requests,
    StepRequests,
    evaluated,
    reordered,
    repeated,
    settled,
    shortened,
    with_workspaces,
)
from memtriage.allocator.settings import parse_conf

MIB = 1 << 20
WEIGHT = 8 * MIB
ACTIVATION = 30 * MIB


def step(first: int, activation: int = ACTIVATION, *, state: int | None = None) -> StepRequests:
    """A gradient, an activation; the one before it leaves its activation to this one."""
    made = [(first, activation), (first + 1, WEIGHT)]
    lasting = [] if state is None else [(state, WEIGHT)]
    freed = [(first, FREE), (first + 1, FREE)]
    return StepRequests((*made, *lasting, *freed), forward=1)


def alike(steps: int = 3) -> Requests:
    first = step(10, state=5)
    return Requests(((0, WEIGHT),), (first, *(step(20 + 10 * number) for number in range(steps - 1))))


def differing() -> Requests:
    return Requests(((0, WEIGHT),), tuple(step(10 * size, size * MIB) for size in (20, 30, 40, 50)))


def balance(requests: Requests) -> int:
    """Bytes that are alive at the end; fails where a block is made or freed twice."""
    live: dict[int, int] = {}
    for block, size in requests.all():
        if size:
            assert block not in live
            live[block] = size
        elif block != EMPTIED:
            live.pop(block)
    return sum(live.values())


def sizes(played: StepRequests) -> list[int]:
    return [size for _, size in played.requests if size]


def test_alike_steps_go_on_as_the_last_one() -> None:
    longer = repeated(alike(), 40)
    assert len(longer.steps) == 40
    assert {tuple(sizes(one)) for one in longer.steps[1:]} == {(ACTIVATION, WEIGHT)}
    assert balance(longer) == balance(alike()) == 2 * WEIGHT
    assert settled(alike())


def test_differing_steps_come_again_in_their_order_without_the_first() -> None:
    longer = repeated(differing(), 8)
    assert [sizes(one)[0] // MIB for one in longer.steps] == [20, 30, 40, 50, 30, 40, 50, 30]
    assert not settled(differing())


def test_a_block_that_a_step_leaves_to_the_next_is_freed_once_per_step() -> None:
    crossing = Requests(
        (),
        (
            StepRequests(((1, ACTIVATION),)),
            StepRequests(((2, ACTIVATION), (1, FREE))),
            StepRequests(((3, ACTIVATION), (2, FREE))),
            StepRequests(((4, ACTIVATION), (3, FREE))),
        ),
    )
    longer = repeated(crossing, 20)
    assert balance(longer) == ACTIVATION
    assert all(len(one.requests) == 2 for one in longer.steps[1:])


def test_a_step_played_again_makes_no_second_set_of_what_lasts() -> None:
    late = Requests((), (step(10), step(20, state=3), step(30, 31 * MIB), step(40, 33 * MIB)))
    assert balance(repeated(late, 12)) == balance(late) == WEIGHT


def test_other_orders_keep_all_steps() -> None:
    assert reordered(alike(), 0) is None
    other = reordered(differing(), 0)
    assert other is not None
    assert sorted(sizes(one)[0] // MIB for one in other.steps[:4]) == [20, 30, 40, 50]
    assert balance(other) == WEIGHT


def test_shorter_batches_shrink_what_does_not_last() -> None:
    shorter = shortened(alike(), (0.5, 1.0))
    assert sizes(shorter.steps[0]) == [ACTIVATION, WEIGHT, WEIGHT]
    assert sizes(shorter.steps[1]) == [ACTIVATION // 2, WEIGHT]
    assert sizes(shorter.steps[2]) == [ACTIVATION, WEIGHT]
    assert balance(shorter) == 2 * WEIGHT


def test_workspaces_come_when_the_most_is_alive() -> None:
    step = StepRequests(((1, 10 * MIB), (EMPTIED, FREE), (2, 30 * MIB), (1, FREE), (3, 5 * MIB)), forward=4)
    after = with_workspaces(Requests(((0, 60 * MIB),), (step, StepRequests(((2, FREE), (3, FREE))))), 0.5)
    first, second = after.steps
    assert first.requests[:3] == step.requests[:3] and first.requests[5:] == step.requests[3:]
    assert first.requests[3:5] == ((4, 50 * MIB), (4, FREE))  # half of 60, 10 and 30
    assert (first.forward, second.forward) == (6, None)
    assert second.requests == ((5, 50 * MIB), (5, FREE), (2, FREE), (3, FREE))
    assert with_workspaces(Requests((), (step,)), 0.001).steps == (step,)


def test_an_evaluation_keeps_only_the_last_few_blocks() -> None:
    after = evaluated(alike(), kept=1)
    assert len(after.steps) == 5
    assert sizes(after.steps[2]) == [ACTIVATION]
    assert balance(after) == balance(alike())


def test_an_evaluation_allocates_what_the_forward_pass_does_and_empties_no_cache() -> None:
    forward = ((1, ACTIVATION), (2, WEIGHT), (1, FREE), (EMPTIED, FREE), (EMPTIED, 7), (3, MIB))
    rest = ((2, FREE), (3, FREE))
    steps = (StepRequests(((0, MIB), (0, FREE))), StepRequests((*forward, *rest), forward=len(forward)))
    after = evaluated(Requests((), steps), kept=2)
    evaluation = after.steps[2]
    blocks = [block for block, size in evaluation.requests if size]
    assert sizes(evaluation) == [ACTIVATION, WEIGHT, MIB]
    assert min(blocks) > 3  # numbers of their own
    assert [block for block, size in evaluation.requests if not size] == blocks
    assert evaluation.requests[3] == (blocks[0], FREE)  # when more than two are alive
    assert evaluation.forward == len(evaluation.requests)


def test_a_log_has_the_large_blocks_of_the_default_stream() -> None:
    log = RequestLog(parse_conf("", "2.11"))
    for action, address, size, stream in (
        ("alloc", 1, 2 * MIB, 0),
        ("alloc", 2, MIB, 0),
        ("alloc", 3, 2 * MIB, 7),
        ("free_requested", 1, 2 * MIB, 0),
        ("free_completed", 1, 2 * MIB, 0),
        ("free_completed", 3, 2 * MIB, 7),
        ("alloc", 1, 3 * MIB, 0),
    ):
        log(AllocatorEvent(action, address, size, stream, (0, 0)))  # type: ignore[arg-type]
    log.emptied()
    assert log.requests == [(0, 2 * MIB), (0, FREE), (1, 3 * MIB), (EMPTIED, FREE)]


def test_a_free_counts_when_it_takes_effect() -> None:
    log = RequestLog(parse_conf("", "2.11"))
    for action in ("alloc", "free_requested"):
        log(AllocatorEvent(action, 1, 2 * MIB, 0, (0, 0)))  # type: ignore[arg-type]
    assert log.requests == [(0, 2 * MIB)]


def test_the_first_steps_played_again_are_as_they_were() -> None:
    """They free what was there before them, once, and empty the cache."""
    before = ((0, WEIGHT), (1, WEIGHT), (2, WEIGHT), (2, FREE))
    steps = (
        StepRequests(((10, ACTIVATION), (0, FREE), (10, FREE))),
        *(StepRequests(((n, ACTIVATION), (EMPTIED, FREE), (n, FREE))) for n in (20, 30)),
    )
    longer = repeated(Requests(before, steps), 5)
    assert longer.before == before
    assert [
        [(EMPTIED if block == EMPTIED else 0, size) for block, size in one.requests] for one in longer.steps
    ] == [
        [(0, ACTIVATION), (0, FREE), (0, FREE)],
        *[[(0, ACTIVATION), (EMPTIED, FREE), (0, FREE)]] * 4,
    ]
    assert (0, FREE) in longer.steps[0].requests
    assert balance(longer) == WEIGHT


def test_steps_that_are_enough_or_too_few_to_repeat_stay_as_they_are() -> None:
    one, three = Requests((), (step(10),)), alike()
    assert repeated(one, 9) is one
    assert repeated(three, 3) is three and repeated(three, 2) is three


def test_all_requests_come_in_order() -> None:
    three = alike()
    assert three.all()[:2] == [(0, WEIGHT), (10, ACTIVATION)] and len(three.all()) == 1 + 5 + 4 + 4
