"""From lifetimes to the allocator's counters, step by step."""

import pytest

from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.settings import AllocatorSettings
from memtriage.prediction.simulate import LiveReplay, Replay, StepCounters, phase_at, replay
from support.traced import recorded

MIB = 1 << 20
GIB = 1 << 30
SETTINGS = AllocatorSettings()

TRAINING = """
    + weight 1000
    + table 30000000
    forward 0
    + hidden 3000000
    + more 600
    - more
    backward 0
    + gradient 4000000
    - hidden
    optimizer 0
    + state 5000000
    - gradient
    forward 1
    + hidden 3000000
    backward 1
    - hidden
"""


def counters(text, steps=2, **options):
    recording, _ = recorded(text)
    return replay(recording, SETTINGS, 80 * GIB, steps, **options)


def rounded(*sizes):
    return sum(-(-size // 512) * 512 for size in sizes)


def test_each_step_has_its_peak_and_what_it_leaves():
    first, second = counters(TRAINING)
    kept = rounded(1000, 30_000_000)
    assert first == StepCounters(
        peak_allocated=kept + rounded(4_000_000, 5_000_000),
        peak_reserved=2 * MIB + 30 * MIB + 20 * MIB,
        end_allocated=kept + rounded(5_000_000),
        peak_event=7,
    )
    assert second == StepCounters(
        kept + rounded(5_000_000, 3_000_000), 52 * MIB, kept + rounded(5_000_000), 9
    )
    assert counters(TRAINING, 1)[0].peak_reserved == first.peak_reserved


def test_what_a_step_begins_with_may_be_its_peak():
    only = counters("+ a 1000\n forward 0\n - a\n + b 512", 1)[0]
    assert only == StepCounters(1024, 2 * MIB, 512, 1)


def test_phases_and_steps_begin_where_they_are_marked():
    recording, _ = recorded(TRAINING)
    assert recording.starts(2) == [2, 9]
    assert [phase_at(recording, event) for event in range(len(recording.events))] == [
        *["build"] * 2, *["forward"] * 3, *["backward"] * 2, *["optimizer"] * 2, "forward", "backward",
    ]  # fmt: skip
    with pytest.raises(KeyError):
        recording.starts(3)


def test_a_limit_is_kept_by_emptying_the_cache_or_not_at_all():
    text = "+ a 30000000\n - a\n forward 0\n + b 40000000"
    assert counters(text, 1)[0].peak_reserved == 30 * MIB + 40 * MIB
    assert counters(text, 1, limit=60 * MIB)[0].peak_reserved == 40 * MIB
    with pytest.raises(OutOfMemory):
        counters(text, 1, limit=30 * MIB)
    half = AllocatorSettings(memory_fraction=0.5)
    assert replay(recorded(text)[0], half, 80 * MIB, 1)[0].peak_reserved == 40 * MIB
    with pytest.raises(OutOfMemory):
        replay(recorded(text)[0], half, 79 * MIB, 1)


def test_an_emptied_cache_is_reserved_again():
    text = "+ a 30000000\n - a\n{}\n forward 0\n + b 40000000\n - b"
    assert [counters(text.format(line), 1)[0].peak_reserved for line in ("", "empty")] == [70 * MIB, 40 * MIB]
    late, _ = recorded("+ a 30000000\n - a\n empty")
    asked = LiveReplay(late, lambda: SETTINGS, 80 * GIB)
    assert asked.reserved() == 0


def test_blocks_that_another_stream_uses_are_free_when_it_has_passed():
    text = "+ a 30000000\n use a 1\n - a\n{}\n forward 0\n + b 30000000"
    assert [counters(text.format(line), 1)[0].peak_reserved for line in ("", "passed 1", "passed 2")] == [
        # Where a phase begins, all streams have passed.
        *(30 * MIB, 30 * MIB, 30 * MIB)
    ]
    text = "forward 0\n + a 30000000\n use a 1\n - a\n{}\n + b 30000000"
    assert [counters(text.format(line), 1)[0].peak_reserved for line in ("", "passed 1", "passed 2")] == [
        *(60 * MIB, 30 * MIB, 60 * MIB)
    ]


def test_streams_and_pools_have_segments_of_their_own():
    text = "+ a 30000000\n - a\n {}\n forward 0\n + b 30000000"
    lines = ("stream 0", "stream 1", "pool 3")
    assert [counters(text.format(line), 1)[0].peak_reserved for line in lines] == [
        *(30 * MIB, 60 * MIB, 60 * MIB)
    ]


def test_primed_blocks_are_reserved_before_the_model():
    assert counters("+ a 1000\n forward 0", 1, primed=(40 * MIB, 10 * MIB))[0] == StepCounters(
        1024, 52 * MIB, 1024, 1
    )


def test_states_of_optimizers_come_from_pools_that_are_primed():
    text = """
        + weight 1000
        forward 0
        state_of 0
        + first 3000000
        + second 3000000
        state_of 1
        + other 3000000
        state_of -1
        forward 1
        + rest 3000000
    """
    without = counters(text)
    assert [step.peak_reserved for step in without] == [22 * MIB, 22 * MIB]
    # Nobody else uses what a pool has left; the other optimizer has none.
    primed = counters(text, pools={0: 30 * MIB})
    assert [step.peak_reserved for step in primed] == [2 * MIB + 30 * MIB + 20 * MIB] * 2
    assert [step.end_allocated for step in primed] == [step.end_allocated for step in without]
    # Once they are freed, an emptied cache returns the pool's segment.
    freed = "state_of 0\n + state 3000000\n - state\n state_of -1\n empty\n + weight 1000\n forward 0"
    assert counters(freed, 1, pools={0: 30 * MIB})[0].peak_reserved == 2 * MIB


def test_a_private_pool_is_put_back_into_a_state_that_it_had():
    text = """
        pool 3
        + a 3000000
        + b 4000000
        keep 3
        - a
        forward 0
        + c 15000000
        restore 0 b
        forward 1
        - b
        + d 3000000
    """
    recording, _ = recorded(text)
    first, second = replay(recording, SETTINGS, 80 * GIB, 2)
    a, b = rounded(3_000_000), rounded(4_000_000)
    # To put it back, torch allocates the whole segment of 20 MiB for a moment.
    assert first == StepCounters(20 * MIB, 20 * MIB + 16 * MIB, a + b, 6)
    assert second == StepCounters(a + b, 36 * MIB, a + a, 8)


def test_what_a_program_asks_is_simulated_as_far_as_it_is():
    recording, _ = recorded(TRAINING)
    whole, recording.events = recording.events, recording.events[:5]
    asked_settings = []
    asked = LiveReplay(recording, lambda: asked_settings.append(1) or SETTINGS, 80 * GIB)
    assert asked_settings == []
    peak = rounded(1000, 30_000_000, 3_000_000, 600)
    stats = asked.stats()
    assert {name: value for name, value in stats.items() if value} == {
        "allocated_bytes.all.current": peak - 1024,
        "allocated_bytes.all.peak": peak,
        "active_bytes.all.current": peak - 1024,
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.current": 52 * MIB,
        "reserved_bytes.all.peak": 52 * MIB,
        "requested_bytes.all.current": 33_001_000,
    }
    assert len(stats) == 122
    assert stats["oversize_segments.freed"] == stats["num_ooms"] == stats["max_split_size"] == 0
    asked.reset_peaks()
    assert asked.stats()["allocated_bytes.all.peak"] == peak - 1024
    recording.events.extend(whole[5:])
    assert asked.stats()["allocated_bytes.all.peak"] == rounded(1000, 30_000_000, 4_000_000, 5_000_000)
    assert asked.reserved() == 52 * MIB and asked_settings == [1]


def test_every_event_of_the_allocator_can_be_followed():
    recording, _ = recorded("+ a 1000\n - a\n + b 2000")
    seen = []
    fed = Replay(recording, SETTINGS, 80 * GIB, hook=seen.append)
    fed.advance(2)
    few = len(seen)
    fed.advance(3)
    assert (fed.position, fed.peak, fed.peak_event) == (3, 2048, 2)
    assert 0 < few < len(seen)
    fed.reset_peaks()
    assert (fed.peak, fed.peak_event) == (2048, 3)
