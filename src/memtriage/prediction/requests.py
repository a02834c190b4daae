"""From a trace to what it asks of the allocator's large blocks, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from memtriage.allocator.requests import RequestLog, Requests, StepRequests
from memtriage.prediction.lifetimes import AllocationTrace
from memtriage.prediction.simulate import Replay
from memtriage.prediction.trace import Trace


def requests_of(
    trace: Trace, device_memory: int, pools: Mapping[int, int] = MappingProxyType({})
) -> Requests:
    """What a traced program asks for large blocks of the default stream.

    Args:
        device_memory: bytes of the device.
        pools: as in `Replay`: what is made there is not among the requests.
    """
    recording = trace.recording
    log = RequestLog(trace.settings)
    replay = Replay(recording, trace.settings, device_memory, hook=log, pools=pools)
    starts = [*recording.starts(trace.steps), len(recording.events)]
    releases = iter([*recording.releases, len(recording.events) + 1])
    release = next(releases)

    def advance(end: int) -> int:
        """Feed the events up to this one; returns how many requests there are then."""
        nonlocal release
        while release < end:
            replay.advance(release)
            log.emptied()
            release = next(releases)
        replay.advance(end)
        return len(log.requests)

    before = advance(starts[0])
    steps: list[StepRequests] = []
    first = before
    for step in range(trace.steps):
        middle = first
        forward_end = _forward_end(recording, step, starts[step + 1])
        if forward_end is not None:
            middle = advance(forward_end)
        last = advance(starts[step + 1])
        forward = None if forward_end is None else middle - first
        steps.append(StepRequests(tuple(log.requests[first:last]), forward))
        first = last
    return Requests(tuple(log.requests[:before]), tuple(steps), trace.convolves)


def _forward_end(recording: AllocationTrace, step: int, end: int) -> int | None:
    """Index of the event at which the first backward pass of a step begins; None where it has none."""
    for marker in recording.markers:
        if marker.step == step and marker.phase == "backward" and marker.event <= end:
            return marker.event
    return None
