"""What a call did to host memory: rows close; new, first-touched and transient bytes are distinguished."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memtriage
from memtriage.account.host_ledger import TensorPlace
from memtriage.account.host_reading import read_host
from memtriage.account.host_step import HostPicture, host_step, subtract
from memtriage.model.host_step import HostStep
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.observe.host_peak import PeakMeter
from support.paths import named

MIB = 1 << 20
needs_smaps = pytest.mark.skipif(read_host() is None, reason="needs /proc/self/smaps")


def picture(*places: TensorPlace, other: int = 0) -> HostPicture:
    rows: dict[tuple[str, str | None], int] = {("malloc retained", None): other}
    for place in places:
        key = (place.row, place.owner)
        rows[key] = rows.get(key, 0) + place.resident
    table = [LedgerRow(row=row, owner=owner, bytes=nbytes) for (row, owner), nbytes in rows.items()]
    ledger = Ledger(device="host", total=sum(rows.values()), source="test", rows=table)
    return HostPicture(ledger, places)


def place(address: int, nbytes: int, resident: int | None = None, holder: str | None = None) -> TensorPlace:
    return TensorPlace(
        address,
        nbytes,
        "CPU tensors",
        "variable",
        nbytes if resident is None else resident,
        None if holder is None else named(holder),
    )


def difference(
    before: HostPicture, after: HostPicture, peak: int = 0, parameters: int | None = None
) -> HostStep:
    return subtract(before, after, "call", peak, PeakMeter(), parameters)


def test_new_first_touched_and_gone_are_told_apart() -> None:
    before = picture(place(1, 100), place(2, 400, 50), other=30)
    after = picture(place(2, 400, 350, "lazy"), place(3, 1000, holder="made"), other=75)
    result = difference(before, after, peak=3000, parameters=100)
    assert (result.added, result.transient, result.retained) == (1245, 3000 - 1425, 45)
    tensors, kept = result.deltas
    assert (tensors.new, tensors.first_touch, tensors.gone) == (1000, 300, 100)
    assert (tensors.bytes, tensors.holder) == (1200, "made")
    assert (kept.row, kept.bytes) == ("malloc retained", 45)
    assert result.per_parameter(1200) == 12.0
    assert "12.00 B/param" in str(result) and "largest made" in str(result)


def test_changed_owner_is_a_move_and_first_touch_no_new_tensor() -> None:
    """Optimizer state that lies untouched in a mapping until the first step."""
    then = place(1, 1000, 100)._replace(path=named("pool"))
    now = then._replace(owner="optimizer state", resident=1000, path=named("state"))
    result = difference(picture(then), picture(now))
    told = {delta.owner: (delta.bytes, delta.new, delta.first_touch, delta.moved) for delta in result.deltas}
    assert told == {"optimizer state": (1000, 0, 900, 100), "variable": (-100, 0, 0, -100)}


places = st.builds(
    TensorPlace,
    address=st.integers(1, 6),
    nbytes=st.integers(1, 3),
    row=st.sampled_from(["CPU tensors", "pinned tensors"]),
    owner=st.sampled_from(["parameter", "variable"]),
    resident=st.integers(0, 100),
    path=st.none(),
)
pictures = st.lists(places, max_size=6, unique_by=lambda one: one.address).map(lambda found: picture(*found))


@given(pictures, pictures)
def test_deltas_sum_to_what_was_added(before: HostPicture, after: HostPicture) -> None:
    result = difference(before, after)
    assert sum(delta.bytes for delta in result.deltas) == result.added
    assert result.transient == 0
    for delta in result.deltas:
        if delta.row != "malloc retained":
            assert delta.bytes <= delta.new + delta.first_touch + delta.moved - delta.gone


@given(pictures)
def test_a_call_that_does_nothing_changes_nothing(one: HostPicture) -> None:
    result = difference(one, one)
    assert (result.added, result.deltas, result.retained) == (0, (), 0)


@needs_smaps
def test_optimizer_state_at_the_first_step_and_none_at_the_second() -> None:
    model = torch.nn.Linear(2048, 2048, bias=False)
    model(torch.ones(1, 2048)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = memtriage.host_step("optimizer.step")
    for _ in range(2):
        with step:
            optimizer.step()
    first, second = step.results
    state = next(delta for delta in first.deltas if delta.owner == "optimizer state")
    assert state.new == pytest.approx(8 * model.weight.numel(), abs=MIB)
    assert state.holder is not None and "exp_avg" in state.holder
    assert first.added == pytest.approx(8 * model.weight.numel(), abs=16 * MIB)
    assert sum(delta.bytes for delta in first.deltas) == first.added
    assert abs(second.added) < 16 * MIB


@needs_smaps
def test_memory_that_was_mapped_before_and_is_written_now() -> None:
    mapping = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    lazy = torch.frombuffer(mapping, dtype=torch.uint8)
    with host_step("fill") as step:
        lazy.fill_(1)
    touched = max(step.result.deltas, key=lambda delta: delta.first_touch)
    assert touched.first_touch == 64 * MIB
    assert touched.new < MIB


@needs_smaps
def test_what_is_gone_at_the_end_of_a_call_is_its_transient() -> None:
    # Twice its size is above malloc's largest threshold for memory of its own (32 MiB): what the process has
    # kept of earlier tests can't serve it.
    data = torch.ones(32 * MIB // 4)

    @(step := host_step("norm"))
    def norm() -> float:
        return float(data.double().norm(2))

    norm()
    assert step.result.transient == pytest.approx(64 * MIB, abs=12 * MIB)
    assert step.result.added < 12 * MIB


@needs_smaps
def test_a_block_that_raises_has_its_result() -> None:
    step = host_step("broken")
    with pytest.raises(RuntimeError, match="no result yet"):
        _ = step.result
    with pytest.raises(ValueError, match="as it was"), step:
        raise ValueError("as it was")
    assert step.result.name == "broken"
