"""Events read from the bytes of a pickle are those that the unpickler makes."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.allocator.trace_columns import StackTable, TraceColumns, trace_columns
from memtriage.snapshots.file import loaded
from memtriage.snapshots.packed import pack

ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "snapshot", "a_new_kind")
FRAMES = [{"name": f"f{number}", "filename": "train.py", "line": number} for number in range(300)]
SIZES = (0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40, 0x7D94286800, 0x2868_1094_7D)


def traced(seed: int, least: int = 300) -> list[dict[str, Any]]:
    """A trace as torch makes it: shared keys, shared frames, and lists that some events share."""
    chance = random.Random(seed)
    pools, strings = chance.random() < 0.5, chance.random() < 0.5
    lists: list[list[dict[str, Any]]] = [[]]
    trace = []
    for number in range(least + chance.randrange(60)):
        if chance.random() < 0.6:
            lists.append(list(chance.sample(FRAMES[: 1 + number], min(number, chance.choice([0, 1, 2, 7])))))
        event: dict[str, Any] = {
            "action": chance.choice(ACTIONS if number % 50 < 49 else ("oom",)),
            "addr": chance.choice(SIZES) * 512,
            "size": chance.choice(SIZES),
            "stream": chance.choice((0, 0, 0, 94)),
            "time_us": 1_795_475_823_860_789 + number,
        }
        if strings:
            event["compile_context"] = "".join(["N", "/A"])
            event["user_metadata"] = "".join(["step ", str(number % 3)]) if number % 7 else ""
        if pools:
            event["pool_id"] = (chance.choice([0, 0, 1]), 0)
        if event["action"] == "oom":
            event["device_free"] = event.pop("addr")
        event["frames"] = lists[-1 if chance.random() < 0.8 else chance.randrange(len(lists))]
        trace.append(event)
    return trace


def read(snapshot: dict[str, Any], folder: Path, protocol: int = 4) -> tuple[list[TraceColumns], StackTable]:
    """Columns of all devices, by way of the packed events."""
    path = folder / "one.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    table = StackTable()
    with loaded(path) as raw:
        return [trace_columns(trace, table) for trace in raw["device_traces"]], table


def assert_same(found: list[TraceColumns], table: StackTable, traces: list[list[dict[str, Any]]]) -> None:
    plain = StackTable()
    for columns, trace in zip(found, traces, strict=True):
        wanted = trace_columns(trace, plain)
        for name in ("time_us", "kind", "address", "size", "stream"):
            assert np.array_equal(getattr(columns, name), getattr(wanted, name)), name
        assert (columns.pool, columns.device_free) == (wanted.pool, wanted.device_free)
        mine, theirs = table.stacks(), plain.stacks()
        assert [mine[number] for number in columns.stack] == [theirs[number] for number in wanted.stack]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


LONG = "x" * 20_000
"""Makes the file large enough to be worth it."""


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 32), protocol=st.sampled_from([2, 3, 4, 5]))
def test_columns_are_those_of_the_objects(
    seed: int, protocol: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trace = traced(seed)
    snapshot = {"segments": [], "note": LONG, "device_traces": [[], trace], "external_annotations": []}
    found, table = read(snapshot, tmp_path_factory.mktemp("packed"), protocol)
    assert_same(found, table, [[], trace])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1 << 32))
def test_devices_that_share_frames_stay_apart(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = traced(seed), traced(seed + 1)
    snapshot = {"segments": [], "note": LONG, "device_traces": [first, second], "external_annotations": []}
    found, table = read(snapshot, tmp_path_factory.mktemp("packed"))
    assert_same(found, table, [first, second])


def regular(events: int) -> list[dict[str, Any]]:
    return [
        {
            "action": "".join(["al", "loc"]) if number < 2 else ACTIONS[number % 3],
            "addr": number * 512 + 2**40,
            "size": 512,
            "stream": 0,
            "time_us": number,
            "frames": [FRAMES[number % 40], FRAMES[number % 3]],
        }
        for number in range(events)
    ]


def test_a_long_trace_leaves_next_to_nothing(folder: Path) -> None:
    trace = regular(5000)
    data = pickle.dumps({"segments": [], "device_traces": [trace]}, 4)
    packed = pack(data)
    assert packed is not None
    assert len(packed.columns) > 4900
    assert len(packed.rest) < len(data) / 10
    assert_same(*read({"segments": [], "device_traces": [trace]}, folder), [trace])


def test_later_references_to_a_list_of_an_event_still_find_it(folder: Path) -> None:
    trace = regular(3000)
    blocks = [{"size": 512, "frames": trace[number]["frames"]} for number in (7, 1500, 2999)]
    snapshot = {"device_traces": [trace], "segments": [{"blocks": blocks}]}
    path = folder / "one.pickle"
    path.write_bytes(pickle.dumps(snapshot, 4))
    with loaded(path) as raw:
        assert raw["segments"] == snapshot["segments"]
        assert len(raw["device_traces"][0].columns) > 2900
    assert_same(*read(snapshot, folder), [trace])


def test_what_has_another_form_is_left_alone() -> None:
    for raw in (
        {"segments": [], "device_traces": [], "note": LONG},
        {"segments": [], "device_traces": [regular(5)], "note": LONG},
        {"device_traces": [[{"action": "alloc", "frames": 3}] * 300], "note": LONG},
        [regular(3000)],
    ):
        data = pickle.dumps(raw, 4)
        assert pack(data) is None
        assert pickle.load(io.BytesIO(data)) == raw


@settings(deadline=None, max_examples=200)
@given(where=st.floats(0, 1), value=st.integers(0, 255), cut=st.booleans())
def test_damage_raises_nothing_here(where: float, value: int, cut: bool) -> None:
    at = int(where * (len(DAMAGED) - 1))
    pack(DAMAGED[:at] if cut else DAMAGED[:at] + bytes([value]) + DAMAGED[at + 1 :])


DAMAGED = pickle.dumps({"segments": [], "device_traces": [regular(500)]}, 4)


Change = Callable[[int, dict[str, Any], list[dict[str, Any]]], dict[str, Any]]


def with_size(size: int) -> Change:
    return lambda number, event, before: {**event, "size": size}


def changed(change: Change, events: int = 2000) -> list[dict[str, Any]]:
    trace: list[dict[str, Any]] = []
    for number, event in enumerate(regular(events)):
        trace.append(change(number, event, trace))
    return trace


SPELLED_OUT = 40
"""Events of `regular` that bring new frames: they stay as they are."""


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    ("change", "left"),
    [
        pytest.param(lambda number, event, before: event, SPELLED_OUT, id="usual"),
        pytest.param(lambda number, event, before: {**event, "frames": []}, 5, id="no frames"),
        pytest.param(
            lambda number, event, before: {**event, "frames": [FRAMES[0], FRAMES[1]][: 1 + (number < 2)]},
            5, id="one frame",
        ),
        pytest.param(
            lambda number, event, before: {
                **event, "frames": before[number // 2]["frames"] if number > 4 else event["frames"]
            },
            5, id="frames of an older event",
        ),
        pytest.param(
            lambda number, event, before: {
                **event, "pool_id": (number % 2, 0), "frames": event.pop("frames")
            },
            SPELLED_OUT, id="pools",
        ),
        pytest.param(
            lambda number, event, before: {
                **event, "user_metadata": "".join(["step ", str(number)]), "frames": event.pop("frames")
            },
            SPELLED_OUT, id="a new string in each",
        ),
        pytest.param(
            lambda number, event, before: {**event, "compile_context": None, "frames": event.pop("frames")},
            SPELLED_OUT, id="None in each",
        ),
        *(
            pytest.param(with_size(size), SPELLED_OUT, id=f"size {size:#x}")
            for power in (8, 16, 31, 32, 39, 40, 47, 48, 55)
            for size in (2**power - 1, 2**power if power < 55 else 0)
        ),
        pytest.param(
            lambda number, event, before: {**event, "action": "oom"} if number % 50 == 49 else event,
            SPELLED_OUT + 1, id="an action that is named later",
        ),
        pytest.param(
            lambda number, event, before: (
                {key: value for key, value in event.items() if key != "stream"}
                if number % 50 == 48 else event
            ),
            SPELLED_OUT + 40, id="other keys in every fiftieth",
        ),
    ],
)  # fmt: skip
def test_all_events_of_the_usual_form_are_taken_out(
    change: Change, left: int, protocol: int, folder: Path
) -> None:
    trace = changed(change)
    snapshot = {"segments": [], "device_traces": [[], trace]}
    packed = pack(pickle.dumps(snapshot, protocol))
    assert packed is not None
    assert packed.trace == 1
    assert (len(packed.columns), len(packed.columns.loose)) == (2000 - left, left)
    assert_same(*read(snapshot, folder, protocol), [[], trace])


@pytest.mark.parametrize("size", [2**55, 2**62, -1])
def test_numbers_that_do_not_fit_are_left_alone(size: int) -> None:
    assert pack(pickle.dumps({"segments": [], "device_traces": [changed(with_size(size))]}, 4)) is None


def test_loose_events_say_how_many_were_taken_out_before_them() -> None:
    trace = changed(
        lambda number, event, before: {**event, "size": -1} if number in (100, 101, 1998) else event
    )
    packed = pack(pickle.dumps({"segments": [], "device_traces": [trace]}, 4))
    assert packed is not None
    assert packed.columns.loose.tolist() == [0] * SPELLED_OUT + [60, 60, 1956]
    assert packed.columns.time_us[[0, 59, 60, 1955, 1956]].tolist() == [40, 99, 102, 1997, 1999]


def test_too_few_events_are_not_worth_it() -> None:
    def taken(events: int) -> int | None:
        packed = pack(pickle.dumps({"segments": [], "device_traces": [regular(events)], "note": LONG}, 4))
        return None if packed is None else len(packed.columns)

    assert taken(SPELLED_OUT + 63) is None
    assert taken(SPELLED_OUT + 64) == 64


def test_a_short_file_is_not_worth_it() -> None:
    def size_and_result(note: str) -> tuple[int, bool]:
        data = pickle.dumps({"segments": [], "device_traces": [regular(120)], "note": note}, 4)
        return len(data), pack(data) is not None

    least, _ = size_and_result("")
    spare = 20_000 - least - 4  # a note of more than 255 characters has a longer head
    assert spare > 255
    (short, not_worth), (enough, worth) = size_and_result("x" * spare), size_and_result("x" * (spare + 4))
    assert short < 20_000 <= enough
    assert (not_worth, worth) == (False, True)
