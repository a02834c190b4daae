"""A snapshot's dictionaries as columns."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.allocator.trace_columns import (
    StackTable,
    last_events,
    span_ends,
    trace_columns,
)
from memtriage.model.recording import (
    ALLOC,
    MAX_FRAMES,
    NO_FRAMES,
    OOM,
    OTHER_EVENT,
    SnapshotError,
)

FRAME = {"filename": "/home/me/train.py", "line": 3, "name": "f"}


def event(**fields: Any) -> dict[str, Any]:
    return {"action": "alloc", "addr": 512, "size": 10, "stream": 7, "time_us": 5, "frames": []} | fields


def test_fields_become_columns() -> None:
    trace = [
        event(),
        event(action="oom", device_free=99, time_us=6),
        event(action="of_a_newer_kind", time_us=8),
    ]
    del trace[1]["addr"]
    columns = trace_columns(trace, StackTable())
    assert columns.kind.tolist() == [ALLOC, OOM, OTHER_EVENT]
    assert columns.address.tolist() == [512, 0, 512]
    assert columns.size.tolist() == [10, 10, 10]
    assert columns.stream.tolist() == [7, 7, 7]
    assert columns.time_us.tolist() == [5, 6, 8]
    assert columns.device_free == {1: 99}


def test_time_never_falls() -> None:
    columns = trace_columns([event(time_us=time) for time in (5, 9, 7, 10)], StackTable())
    assert columns.time_us.tolist() == [5, 9, 9, 10]


def test_equal_stacks_have_one_number_whether_shared_or_not() -> None:
    table = StackTable()
    shared = [FRAME]
    other = [FRAME, {**FRAME, "line": 4}]
    trace = [event(frames=frames) for frames in (shared, shared, [FRAME], [dict(FRAME)], other, [], None)]
    assert trace_columns(trace, table).stack.tolist() == [1, 1, 1, 1, 2, 0, 0]
    assert [stack.site for stack in table.stacks()] == [NO_FRAMES, "train.py:3 in f", "train.py:3 in f"]


def test_only_the_inner_frames_are_kept_as_text() -> None:
    table = StackTable()
    deep = [{**FRAME, "line": line} for line in range(100)]
    table.number(deep)
    kept = table.stacks()[1].frames
    assert len(kept) == MAX_FRAMES
    assert kept[0] == "/home/me/train.py:0 in f"


def test_a_stack_of_c_code_alone_is_named_by_autograds_node() -> None:
    table = StackTable()
    names = [
        "c10::cuda::malloc(unsigned long)",
        "torch::autograd::generated::MmBackward0::apply(int)",
        "clone",
    ]
    table.number([{"filename": "??", "line": 0, "name": name} for name in names])
    table.number([*({"filename": "??", "line": 0, "name": name} for name in names), FRAME])
    native, mixed = table.stacks()[1:]
    assert native.site == "C++ in torch::autograd::generated::MmBackward0::apply"
    assert mixed.site == "train.py:3 in f"


def test_pools_and_free_memory_are_kept_of_the_events_that_have_them() -> None:
    trace = [event(pool_id=identity) for identity in ((0, 0), (0, 2), None)]
    trace += [event(action="segment_alloc", pool_id=(1, 0)), event(action="free_requested", pool_id=(0, 2))]
    trace += [event(action="oom", device_free="much"), event(device_free=3)]
    columns = trace_columns(trace, StackTable())
    assert (columns.pool, columns.device_free) == ({1: (0, 2), 3: (1, 0)}, {})


@pytest.mark.parametrize("bad", [3, {}, event(size=None), event(size=1 << 80), event(time_us="now")])
def test_an_entry_that_is_no_event_is_named(bad: Any) -> None:
    with pytest.raises(SnapshotError, match="events 0 to 2 hold no event"):
        trace_columns([event(), bad], StackTable())


def test_ends_of_spans_are_found_also_when_nested_or_cut() -> None:
    def mark(stage: str, name: str, time: int) -> dict[str, Any]:
        return {"stage": stage, "name": name, "device": 0, "time_us": time}

    raw = [
        mark("END", "before", 1),
        mark("START", "outer", 2),
        mark("START", "step", 3),
        mark("END", "step", 4),
        mark("START", "step", 5),
        mark("END", "step", 6),
        mark("END", "outer", 7),
        mark("START", "after", 8),
        "nonsense",
        {"name": "no time"},
    ]
    assert span_ends(raw) == {"before": [1], "step": [4, 6], "outer": [7]}
    assert span_ends(None) == {}


def test_the_last_events_keep_what_was_recorded_of_them() -> None:
    trace = [
        event(pool_id=(0, 2), addr=1),
        event(action="oom", device_free=7, addr=2),
        event(pool_id=(0, 3), addr=3, time_us=9),
        event(action="oom", device_free=8, addr=4, time_us=9),
    ]
    columns = trace_columns(trace, StackTable())
    last = last_events(columns, 2)
    assert (last.address.tolist(), last.device_free, last.pool) == ([3, 4], {1: 8}, {0: (0, 3)})
    assert (last.time_us.tolist(), last.kind.tolist(), len(last)) == ([9, 9], [ALLOC, OOM], 2)
    for most in (4, 9):
        whole = last_events(columns, most)
        assert (len(whole), whole.device_free, whole.pool) == (4, {1: 7, 3: 8}, {0: (0, 2), 2: (0, 3)})


def test_a_trace_is_a_list() -> None:
    with pytest.raises(SnapshotError, match="a device's trace is a dict"):
        trace_columns({}, StackTable())  # type: ignore[arg-type]


def test_a_frame_without_its_fields_still_has_a_line() -> None:
    table = StackTable()
    table.number([{}])  # type: ignore[typeddict-item]
    assert table.stacks()[1].frames == ("?:0 in ?",)
