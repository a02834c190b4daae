"""What a traced program asks for large blocks, step by step."""

import pytest

from memtriage.allocator.requests import EMPTIED, FREE, Requests, StepRequests
from memtriage.allocator.settings import AllocatorSettings
from memtriage.prediction.requests import requests_of
from memtriage.prediction.trace import Trace
from support.traced import recorded

BIG, MORE, MOST = 3_000_000, 4_000_000, 5_000_000


def requested(text, steps=1, **options):
    recording, _ = recorded(text)
    return requests_of(Trace(recording, "", AllocatorSettings(), steps=steps), 80 << 30, **options)


def test_requests_are_sorted_into_steps_and_forward_passes():
    found = requested(
        f"""
        + small 1000
        + table {BIG}
        forward 0
        + hidden {MORE}
        backward 0
        + gradient {MOST}
        - hidden
        backward 0
        forward 0
        backward 0
        - gradient
        forward 1
        + hidden {MORE}
        - hidden
        """,
        steps=2,
    )
    assert found == Requests(
        before=((0, BIG),),
        steps=(
            StepRequests(requests=((1, MORE), (2, MOST), (1, FREE), (2, FREE)), forward=1),
            StepRequests(requests=((3, MORE), (3, FREE)), forward=None),
        ),
        convolves=False,
    )


def test_an_emptied_cache_is_a_request():
    found = requested(f"+ a {BIG}\n - a\n empty\n + b {BIG}\n forward 0\n empty\n backward 0\n - b\n empty")
    assert found == Requests(
        before=((0, BIG), (0, FREE), (EMPTIED, 0), (1, BIG)),
        steps=(StepRequests(requests=((EMPTIED, 0), (1, FREE)), forward=0),),
        convolves=False,
    )


@pytest.mark.parametrize("convolves", [True, False])
def test_convolutions_are_passed_on(convolves):
    recording, _ = recorded("forward 0")
    trace = Trace(recording, "", AllocatorSettings(), steps=1, convolves=convolves)
    assert requests_of(trace, 80 << 30) == Requests((), (StepRequests(()),), convolves)
