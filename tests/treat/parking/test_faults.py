"""Whatever fails, and wherever: every value is whole, on the device or at home, and the record says where."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from memtriage.treat.parking import arena as arena_module
from memtriage.treat.parking import transfer
from memtriage.treat.parking.choose import choose
from memtriage.treat.parking.registry import PARKED
from memtriage.treat.parking.transfer import ARENAS, park_choice, unpark_entries
from support.parking import Script

ERRORS = (RuntimeError, MemoryError, KeyboardInterrupt)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each batch takes two of the tensors; nothing is parked before or after."""
    monkeypatch.setattr(transfer, "BATCH", 2 * 400)
    unpark_entries(list(PARKED.values()))
    assert not PARKED
    yield
    if PARKED:
        unpark_entries(list(PARKED.values()))
    assert ARENAS[False].used == 0


def some() -> list[Tensor]:
    return [torch.arange(100.0) + number for number in range(7)]


def whole(tensors: list[Tensor]) -> None:
    """What is not parked is right; what is comes back right."""
    if PARKED:
        unpark_entries(list(PARKED.values()))
    assert all(torch.equal(tensor, there) for tensor, there in zip(tensors, some(), strict=True))
    assert [type(tensor) for tensor in tensors] == [Tensor] * len(tensors)


def operations_of_parking() -> list[str]:
    script = Script()
    tensors = some()
    park_choice(choose(tensors), find_ways=script.ways)
    whole(tensors)
    return script.done


def operations_of_bringing_back() -> list[str]:
    tensors = some()
    park_choice(choose(tensors))
    script = Script()
    unpark_entries(list(PARKED.values()), script.ways)
    whole(tensors)
    return script.done


def test_the_order_of_operations() -> None:
    down = operations_of_parking()
    assert down == ["look", "synchronize", *["down"] * 7, "synchronize", *["resize"] * 7, "release"]
    two = ["resize", "resize", "up", "up"]
    assert operations_of_bringing_back() == ["synchronize", *two * 3, "resize", "up", "synchronize"]


def test_the_host_works_while_copies_are_under_way() -> None:
    script = Script()
    tensors = some()
    park_choice(choose(tensors), find_ways=script.ways, meanwhile=lambda: script.step("meanwhile"))
    begun = script.done.index("meanwhile")
    assert script.done[begun - 1] == "down"
    assert script.done[begun + 1] == "synchronize"
    assert "down" not in script.done[begun:]
    whole(tensors)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_the_host_s_work_moves_nothing(error: type[BaseException]) -> None:
    def fails() -> None:
        raise error("of the work")

    script = Script()
    tensors = some()
    with pytest.raises(error, match="of the work") as caught:
        park_choice(choose(tensors), find_ways=script.ways, meanwhile=fails)
    assert caught.value.__notes__ == ["memtriage.park: nothing was moved, all values are on the device"]
    assert script.done[-1] == "synchronize"
    assert not PARKED
    whole(tensors)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", range(18))
def test_parking_fails_at_every_operation(at: int, error: type[BaseException]) -> None:
    tensors = some()
    script = Script(at, error)
    with pytest.raises(error) as caught:
        park_choice(choose(tensors), find_ways=script.ways)
    if script.done[-1] != "look":
        assert caught.value.__notes__[0].startswith("memtriage.park: ")
    parked = sum(not tensor.untyped_storage().nbytes() for tensor in tensors)
    assert parked == len(PARKED)
    assert parked == 0 or at > 10
    whole(tensors)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", range(16))
def test_bringing_back_fails_at_every_operation_and_goes_on(at: int, error: type[BaseException]) -> None:
    tensors = some()
    park_choice(choose(tensors))
    script = Script(at, error)
    with pytest.raises(error) as caught:
        unpark_entries(list(PARKED.values()), script.ways)
    note = caught.value.__notes__[0]
    back = [tensor for tensor in tensors if type(tensor) is Tensor]
    assert note.startswith(f"memtriage.unpark: {len(back)} of 7 storages")
    assert len(PARKED) == 7 - len(back)
    intact = [
        torch.equal(tensor, there)
        for tensor, there in zip(tensors, some(), strict=True)
        if type(tensor) is Tensor
    ]
    assert all(intact)
    whole(tensors)


def test_two_failures_in_a_row() -> None:
    tensors = some()
    park_choice(choose(tensors))
    for at in (9, 2, 1):
        with pytest.raises(KeyboardInterrupt):
            unpark_entries(list(PARKED.values()), Script(at, KeyboardInterrupt).ways)
    whole(tensors)


def test_host_memory_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        available = 100

    monkeypatch.setattr(arena_module.psutil, "virtual_memory", lambda: Full)
    ARENAS[False].release()
    tensors = some()
    with pytest.raises(MemoryError, match=r"3\.5 KiB more host memory, and 100 B is available") as caught:
        park_choice(choose(tensors))
    assert caught.value.__notes__ == ["memtriage.park: nothing was moved, all values are on the device"]
    assert not PARKED
    whole(tensors)


def test_the_host_refuses_a_chunk_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[arena_module.PinnedMemory] = []
    closed: list[arena_module.PinnedMemory] = []
    one_at_a_time = threading.Lock()

    class Scarce(arena_module.PinnedMemory):
        def __init__(self, nbytes: int, *, pin: bool) -> None:
            with one_at_a_time:  # chunks are made by several threads
                if len(made) == 2:
                    raise MemoryError("no more")
                super().__init__(nbytes, pin=pin)
                made.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(arena_module, "PinnedMemory", Scarce)
    small = arena_module.HostArena(pin=False, chunk=4096)
    with pytest.raises(MemoryError, match="no more"):
        small.take([3 * 4096 + 1])
    assert (small.owned, len(made), closed) == (0, 2, made)
    made.clear()
    assert sum(piece.length for piece in small.take([2 * 4096])[0]) == 2 * 4096
