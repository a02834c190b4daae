"""What follows from random draws follows from others in the same way, without the trace."""

from collections import Counter
from itertools import combinations

import pytest
import torch

from memtriage.prediction.drawn import ChangedError, Draws, scores
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.many_steps.programs import ShapedBuild
from memtriage.prediction.many_steps.shapes import inputs_of
from memtriage.prediction.routing import Routing
from memtriage.prediction.trace import trace
from memtriage.prediction.values import KnownValues
from support.experts import CHOSEN, EXPERTS, RECORDED, WAYS, mixture

STEPS = 4
TOKENS = 512
aten = torch.ops.aten


def traced(routing=None, **options):
    """The draws of each step, and the random state before its first layer."""
    states = []
    build = mixture(tokens=TOKENS, before_layers=lambda: states.append(torch.cuda.get_rng_state()), **options)
    program = ShapedBuild(build, inputs_of(None, STEPS))
    program.routing = None if routing is None else Routing("recorded", routing)
    return trace(program, machine("h200"), (2, 13), STEPS).draws, states


def generator_in(state):
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def near(counted, trials, chance):
    """Whether something of this chance came so often, but for five standard deviations."""
    return abs(counted - trials * chance) <= 5 * (trials * chance * (1 - chance)) ** 0.5


def chosen_of(chances, count, experts=EXPERTS):
    drawn = scores((20_000, experts), chances, torch.Generator().manual_seed(7))
    assert drawn.min() >= 0 and drawn.max() <= 1
    return drawn.topk(count, -1).indices


@pytest.mark.parametrize(
    ("weights", "count"),
    [([7, 2, 1], 1), (RECORDED[0], CHOSEN), ([1, 1, 0, 0], 2), ([6, *range(1, 16), 0, 0], 8)],
)
def test_each_expert_is_chosen_as_often_as_was_recorded(weights, count):
    chances = torch.tensor(weights, dtype=torch.float64) * count / sum(weights)
    chosen = chosen_of(chances, count, len(weights))
    counts = torch.bincount(chosen.flatten(), minlength=len(weights))
    assert all(near(int(n), len(chosen), float(chance)) for n, chance in zip(counts, chances, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("recorded", [False, True])
def test_equal_shares_give_what_is_drawn_without_a_record(recorded, count):
    chances = torch.full((EXPERTS,), count / EXPERTS, dtype=torch.float64) if recorded else None
    rows = chosen_of(chances, count).sort(-1).values.tolist()
    together = list(combinations(range(EXPERTS), count))
    counts = Counter(map(tuple, rows))
    assert counts.keys() == set(together)
    assert all(near(number, len(rows), 1 / len(together)) for number in counts.values())


def test_recorded_routers_send_their_shares_in_traced_and_in_drawn_steps():
    draws, _ = traced(RECORDED, way="where")
    again, generator = draws.last.again(set(range(2 * EXPERTS))), torch.Generator().manual_seed(5)
    for steps in ([draws.numbers(step) for step in range(STEPS)], [again(generator) for _ in range(40)]):
        counts = [sum(step) for step in zip(*(step[: 2 * EXPERTS] for step in steps), strict=True)]
        for got, shares in zip((counts[:EXPERTS], counts[EXPERTS:]), RECORDED, strict=True):
            for number, share in zip(got, shares, strict=True):
                assert near(number, len(steps) * TOKENS, CHOSEN * share / sum(shares))


@pytest.mark.parametrize("routing", [None, RECORDED], ids=["even", "recorded"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_draws_give_the_traced_numbers_and_others_give_others(way, routing):
    draws, states = traced(routing, way=way)
    for step in range(1, STEPS):  # in step 0 the first router has the weights that the host gave it
        numbers = draws.numbers(step)
        assert draws.last.again(set(range(len(numbers))))(generator_in(states[step])) == numbers
    assert draws.numbers(1) != draws.numbers(2)


def test_each_layer_sends_every_token_to_so_many_experts():
    draws, _ = traced(way="where", layers=3)
    numbers = draws.last.again(set(range(3 * EXPERTS)))(torch.Generator().manual_seed(5))
    layers = [numbers[layer * EXPERTS :][:EXPERTS] for layer in range(3)]
    assert [sum(counts) for counts in layers] == [TOKENS * CHOSEN] * 3
    assert layers[0] != layers[1] != layers[2]


def test_what_is_not_wanted_is_not_drawn():
    draws, states = traced(way="where")
    numbers = draws.last.again({1})(generator_in(states[-1]))
    asked = draws.numbers(STEPS - 1)
    assert numbers == [0, asked[1], *[0] * (len(asked) - 2)]


def followed(look):
    """The numbers and draws of a function of values that were drawn."""
    values = KnownValues()
    values.draws = Draws(lambda: 0)
    drawn = values.run(aten.rand.default, ([64],), draws=True)
    look(values, drawn)
    return values.draws.last


def test_a_buffer_that_is_written_later_is_as_it_was_before():
    def look(values, drawn):
        buffer = torch.full((64,), 7)
        values.run(aten.add_.Tensor, (buffer, values.run(aten.ge.Scalar, (drawn, 2.0))))  # adds nothing
        values.run(aten.add_.Tensor, (buffer, buffer))
        values.ask(buffer[:2])

    draws = followed(look)
    assert draws.numbers == [14, 14, 0]
    assert draws.again({0})(torch.Generator()) == [14, 14, 0]


def test_a_number_is_what_it_was_when_it_was_asked_for():
    def look(values, drawn):
        below = values.run(aten.lt.Scalar, (drawn, 0.5))
        trues = values.run(aten.count_nonzero.default, (below,))
        values.ask(trues)
        values.run(aten.add_.Tensor, (trues, 1000))

    draws = followed(look)
    assert 0 < draws.numbers[0] < 64
    assert 0 < draws.again({0})(torch.Generator().manual_seed(3))[0] < 64


def test_a_draw_that_came_to_nothing_is_no_other_tensor():
    values = KnownValues()
    values.draws = Draws(lambda: 0)
    for _ in range(100):
        values.draws.now().draw(torch.rand(64))
        values.ask(values.run(aten.add.Tensor, (torch.arange(64), 1)))
    assert values.draws.last.numbers == []


def test_numbers_of_the_host_alone_are_not_kept():
    def look(values, drawn):
        values.ask(values.run(aten.arange.default, (5,)))
        values.ask(drawn)  # no size: not whole

    assert followed(look).numbers == []


def test_what_depends_on_another_shape_is_refused():
    def look(values, drawn):
        positions = values.run(aten.nonzero.default, (values.run(aten.lt.Scalar, (drawn, 0.5)),))
        values.ask(positions, is_size=True)
        values.ask(values.run(aten.max.default, (positions,)))

    draws = followed(look)
    assert draws.numbers[0] not in (0, 64)
    sizes = {draws.again({0})(torch.Generator().manual_seed(seed))[0] for seed in range(8)}
    assert len(sizes) > 1
    with pytest.raises(ChangedError):
        for seed in range(8):
            draws.again({1})(torch.Generator().manual_seed(seed))
