"""Whose the bytes of the peak instant are."""

import pytest

from memtriage.allocator.settings import AllocatorSettings
from memtriage.prediction.owners import owned_at, owners_at
from memtriage.prediction.simulate import replay
from memtriage.prediction.trace import Trace
from support.traced import recorded

TRAINING = """
    + weight 1000
    + input 300
    forward 0
    + saved 2000
    + of_the_moment 50
    - of_the_moment
    + logits 700
    backward 0
    scratch 9000
    + gradient 1000
    grad 0
    + of_backward 400
    grad 1
    + recomputed 600
    - saved
    - recomputed
    - of_backward
    optimizer 0
    + state 2000
    + of_the_step 5000
    - of_the_step
    forward 1
    + saved_again 2000
    - logits
    backward 1
    - saved_again
"""
OWNERS = {"weight": "parameter", "gradient": "gradient", "state": "optimizer state"}


@pytest.fixture
def traced():
    recording, numbers = recorded(TRAINING)
    found = {numbers[name]: owner for name, owner in OWNERS.items()}
    return Trace(recording, "", AllocatorSettings(), found), {
        number: name for name, number in numbers.items()
    }


AT = {
    3: "weight parameter, input kept, saved activation, of_the_moment temporary",
    6: "weight parameter, input kept, saved activation, logits activation, scratch workspace",
    10: "weight parameter, input kept, saved activation, logits activation, gradient gradient, "
    "of_backward temporary, recomputed activation",
    14: "weight parameter, input kept, logits activation, gradient gradient, state optimizer state",
}
"""Blocks that are alive at an event, and whose they are."""


@pytest.mark.parametrize("event", AT)
def test_what_backward_needs_is_an_activation_and_the_rest_of_the_moment(traced, event):
    trace, names = traced
    owned = owned_at(trace, event)
    assert ", ".join(f"{names.get(number, 'scratch')} {owner}" for number, owner in owned) == AT[event]


def test_owners_of_the_peak_sum_to_what_is_allocated(traced):
    trace, _ = traced
    counters = replay(trace.recording, AllocatorSettings(), 80 << 30, 2)
    for step in counters:
        owners = owners_at(trace, step)
        assert sum(owners.values()) == step.peak_allocated
        assert list(owners.values()) == sorted(owners.values(), reverse=True)
    first, second = (owners_at(trace, step) for step in counters)
    assert first == {"workspace": 9000, "activation": 2700, "parameter": 1000, "rounding": 824, "kept": 300}
    assert second == {
        "optimizer state": 2000, "activation": 2000, "parameter": 1000, "gradient": 1000, "temporary": 700,
        "rounding": 680, "kept": 300,
    }  # fmt: skip


def test_blocks_of_whole_units_leave_no_rounding():
    recording, _ = recorded("+ a 1024\n forward 0\n + b 512")
    trace = Trace(recording, "", AllocatorSettings(), {0: "parameter"})
    (step,) = replay(recording, AllocatorSettings(), 80 << 30, 1)
    assert owners_at(trace, step) == {"parameter": 1024, "activation": 512}
