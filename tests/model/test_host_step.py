"""What a call did to host memory, in figures and words."""

from __future__ import annotations

from memtriage.model.host_step import HostDelta, HostStep
from support.paths import local

MIB = 1 << 20


def step(before: int, after: int, peak: int, parameters: int | None = None, *deltas: HostDelta) -> HostStep:
    return HostStep(
        name="optimizer.step",
        before=before,
        after=after,
        peak=peak,
        peak_source="kernel",
        parameters=parameters,
        deltas=deltas,
        retained=0,
    )


def test_memory_during_the_call_only_is_above_both_ends() -> None:
    assert (step(10, 30, 45).added, step(10, 30, 45).transient) == (20, 15)
    assert (step(30, 10, 45).added, step(30, 10, 45).transient) == (-20, 15)
    assert step(30, 10, 25).transient == 0


def test_bytes_per_parameter_need_a_model() -> None:
    assert step(0, 8, 8, 2).per_parameter(12) == 6.0
    assert step(0, 8, 8).per_parameter(12) is None
    assert step(0, 8, 8, 0).per_parameter(12) is None


def test_a_line_for_each_row_with_its_parts() -> None:
    state = HostDelta(
        row="tensors",
        owner="optimizer state",
        bytes=8 * MIB,
        new=6 * MIB,
        first_touch=3 * MIB,
        gone=-MIB,
        holder_path=local("main", "state"),
    )
    other = HostDelta(row="malloc", owner=None, bytes=2 * MIB, moved=-MIB)
    assert str(step(0, 10 * MIB, 13 * MIB, MIB, state, other)).splitlines() == [
        "optimizer.step added 10.0 MiB, 10.00 B/param; 3.0 MiB, 3.00 B/param more during the call",
        "  8.0 MiB, 8.00 B/param  tensors (optimizer state): new 6.0 MiB; first touch 3.0 MiB; "
        "gone -1.0 MiB; largest frame main(): state",
        "  2.0 MiB, 2.00 B/param  malloc: moved -1.0 MiB",
    ]
    assert str(step(0, MIB, MIB)) == "optimizer.step added 1.0 MiB"
