"""Steps that follow from other draws are what tracing those draws gives."""

from statistics import median, stdev

import pytest
import torch
from torch import nn

import memtriage
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.many_steps.api import horizon_of_program
from memtriage.prediction.many_steps.programs import ShapedBuild
from memtriage.prediction.many_steps.routed import NotRoutedError, RoutedSteps
from memtriage.prediction.many_steps.shapes import FIRST_STEPS, ROUTED, inputs_of
from memtriage.prediction.many_steps.step_trace import cut
from memtriage.prediction.routing import Routing
from memtriage.prediction.trace import trace
from support.experts import EXPERTS, RECORDED, WAYS, WIDTH, mixture
from support.training import training

TRACED = 16


def program_of(build, count, recorded=None):
    program = ShapedBuild(build, inputs_of(None, count))
    program.routing = None if recorded is None else Routing("routing.json", recorded)
    return program


def steps_of(build, count, recorded=None):
    """Steps that were traced, by number, and their draws."""
    found = trace(program_of(build, count, recorded), machine("h200"), (2, 13), count)
    _, *steps = cut(found.recording, found.steps)
    later = {number: step.settled(number) for number, step in enumerate(steps) if number >= FIRST_STEPS}
    return later, found.draws


@pytest.mark.parametrize("recorded", [None, RECORDED], ids=["even", "recorded"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_derived_as_tracing_them_gives(way, again, recorded):
    steps, draws = steps_of(mixture(way, again=again), TRACED, recorded)
    fitted = dict(list(steps.items())[-ROUTED:])
    routed = RoutedSteps(fitted, draws)
    assert routed.error == 0
    assert routed.drawn == 2 * EXPERTS - sum(shares.count(0) for shares in recorded or ())
    others = steps.keys() - fitted.keys()
    assert len(others) == TRACED - FIRST_STEPS - ROUTED
    for number in others:
        assert routed.step(draws.numbers(number)).operations == steps[number].operations


def test_an_expert_without_tokens_cannot_be_derived():
    steps, draws = steps_of(mixture(tokens=2), FIRST_STEPS + ROUTED)
    with pytest.raises(NotRoutedError, match="of 8 traced steps have the same allocations"):
        RoutedSteps(steps, draws)


def test_a_horizon_has_the_spread_of_traced_steps():
    # Few tokens to wide experts: forward and backward of the experts are nearly all that is allocated.
    build = mixture(tokens=256, hidden=4096, layers=1)
    traced = memtriage.predict(build, steps=64).steps[FIRST_STEPS:]
    peaks = [step.peak_allocated for step in traced]
    run = memtriage.horizon(build, steps=1200)
    spread = stdev(peaks)
    # Four standard errors of the median of a normal distribution.
    assert abs(run.allocated_p50 - median(peaks)) < 4 * 1.25 * spread / len(peaks) ** 0.5
    # 99 and 99.9 % are 2.33 and 3.09 deviations above it.
    assert 1.6 * spread < run.allocated_p99 - run.allocated_p50 < 3.1 * spread
    assert run.allocated_p99 < run.allocated_p999 <= run.peak_allocated
    assert run.shapes == 1
    assert [variant.name for variant in run.variants] == ["expandable_segments:True"]


def horizon(build, steps, recorded=None):
    return horizon_of_program(program_of(build, steps, recorded), steps)


@pytest.mark.parametrize(
    ("recorded", "taken"),
    [(None, "each expert equally often"), ([[1] * EXPERTS], "each expert as often as in routing.json")],
    ids=["even", "recorded"],
)
def test_what_was_drawn_is_said(recorded, taken):
    notes = horizon(mixture(), 40, recorded).notes
    said = f"sizes follow from {2 * EXPERTS} numbers that every step draws at random"
    assert any(note.startswith(said) and taken in note and "0.00% off" in note for note in notes)


def test_a_router_with_a_favourite_needs_more():
    build = mixture(tokens=256, hidden=4096, layers=1)
    even, skewed = (horizon(build, 200, [shares]).horizon for shares in ([1, 1, 1, 1], [1, 1, 1, 2.9]))
    assert even.allocated_p999 < skewed.allocated_p50


def test_what_cannot_be_drawn_again_is_said_and_taken_from_one_step():
    found = horizon(mixture(tokens=2), 40)
    assert any("could not be drawn again" in note for note in found.notes)
    later = found.horizon.course[FIRST_STEPS:]
    assert len({point.peak_allocated for point in later}) == 1 < len(later)


def test_draws_on_which_no_size_depends_change_nothing():
    def build(device):
        model = nn.Linear(WIDTH, WIDTH).to(device)

        def loss():
            time = torch.randint(1, 1000, (1,), device=device).item()
            return (model(torch.ones(4, WIDTH, device=device)) / time).sum()

        return training(model, loss)

    found = horizon(build, 40)
    assert not any("at random" in note or "random numbers" in note for note in found.notes)
    assert found.horizon.allocated_p50 == found.horizon.peak_allocated
