"""Streams and events: which stream allocates, which blocks others use, and when a stream has passed."""

import pytest
import torch

from support.traced import traced

SIZE = 1 << 20


def of(recording):
    """Streams of the blocks of `SIZE`, and uses and passings of other streams, in order."""
    blocks = {
        number: place
        for place, number in enumerate(
            number for number, block in enumerate(recording.blocks) if block.size == SIZE
        )
    }
    streams = [recording.blocks[number].stream for number in blocks]
    uses = [
        f"{use.stream} passed" if use.block is None else f"{use.stream} uses {blocks[use.block]}"
        for use in recording.uses
    ]
    return streams, uses


def make(device):
    return torch.empty(SIZE, dtype=torch.uint8, device=device)


def nested(device):
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    made = [make(device)]
    with torch.cuda.stream(one):
        made.append(make(device))
        with two:
            made.append(make(device))
            with one:
                made.append(make(device))
            made.append(make(device))
        made.append(make(device))
    with torch.cuda.stream(None):
        made.append(make(device))
    torch.cuda.set_stream(two)
    made.append(make(device))
    torch.cuda.set_stream(torch.cuda.default_stream())
    made.append(make(device))
    with pytest.raises(KeyError), one:
        raise KeyError
    made.append(make(device))


def used(device, wait=lambda stream, event, current: None):
    side = torch.cuda.Stream()
    kept = make(device)
    kept.record_stream(side)
    event = side.record_event()
    wait(side, event, torch.cuda.current_stream())
    own = make(device)
    own.record_stream(torch.cuda.current_stream())
    return event.query(), side.query()


WAITS = {
    "nobody": lambda side, event, current: None,
    "the stream": lambda side, event, current: side.synchronize(),
    "another stream": lambda side, event, current: current.wait_stream(side),
    "the event": lambda side, event, current: event.synchronize(),
    "for the event": lambda side, event, current: current.wait_event(event),
    "in the event": lambda side, event, current: event.wait(current),
    "an event of the current": lambda side, event, current: current.record_event().wait(side),
    "an event that is recorded again": lambda side, event, current: current.record_event(event).wait(),
    "an event that is never recorded": lambda side, event, current: torch.cuda.Event().synchronize(),
    "an event of what is current": lambda side, event, current: recorded_inside(side).wait(),
    "all": lambda side, event, current: torch.cuda.synchronize(),
    "the current": lambda side, event, current: side.wait_stream(current),
}


def recorded_inside(stream):
    event = torch.cuda.Event(enable_timing=True)
    with stream:
        event.record()
    return event


def test_what_is_allocated_is_of_the_current_stream():
    assert of(traced(nested).trace.recording) == ([0, 1, 2, 1, 2, 1, 0, 2, 0, 0], [])


@pytest.mark.parametrize("waits", WAITS)
def test_a_stream_has_passed_when_something_waits_for_it(waits):
    passed = waits not in (
        *("nobody", "an event of the current", "an event that is recorded again"),
        *("an event that is never recorded", "the current"),
    )
    run = traced(lambda device: used(device, WAITS[waits]))
    assert run.answer == (True, True)
    assert of(run.trace.recording) == ([0, 0], ["1 uses 0", *["1 passed"] * passed])


def test_all_streams_have_passed_when_the_phase_changes():
    def run(device):
        sides = [torch.cuda.Stream(), torch.cuda.Stream()]
        kept = make(device)
        for side in reversed(sides):
            kept.record_stream(side)
        torch.ones(1, device=device, requires_grad=True).sum().backward()

    _, uses = of(traced(run).trace.recording)
    assert uses[:4] == ["2 uses 0", "1 uses 0", "1 passed", "2 passed"]


def test_streams_and_events_say_what_torchs_say():
    def run(device):
        default, side = torch.cuda.default_stream(), torch.cuda.Stream(device, priority=-1)
        event = torch.cuda.Event()
        with side as entered:
            inside = torch.cuda.current_stream() == side and entered is side
        return {
            "equal": (default == torch.cuda.current_stream(), default == side, side == 1, side == side),
            "hashes": len({default, torch.cuda.current_stream(), side}),
            "places": (str(side.device), side.device_index, str(event.device)),
            "numbers": (default.stream_id, default.cuda_stream, side.stream_id, side.cuda_stream),
            "capturing": side.is_capturing(),
            "events": (event.query(), event.elapsed_time(torch.cuda.Event()), event.cuda_event),
            "kinds": (isinstance(side, torch.cuda.Stream), isinstance(event, torch.cuda.Event)),
            "inside": inside,
        }

    assert traced(run, world_size=2, rank=1).answer == {
        "equal": (True, False, False, True),
        "hashes": 2,
        "places": ("cuda:1", 1, "cuda:1"),
        "numbers": (0, 0, 1, 1),
        "capturing": False,
        "events": (True, 1.0, 0),
        "kinds": (True, True),
        "inside": True,
    }
