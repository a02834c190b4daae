"""Whatever fails, and wherever: every value is whole, on the device or at home, and the record says where."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from memtriage.treat.parking import arena as arena_module
from memtriage.treat.parking import transfer
from memtriage.treat.parking.choose import choose
from memtriage.treat.parking.handle import ParkError
from memtriage.treat.parking.registry import PARKED
from memtriage.treat.parking.transfer import ARENAS, forget_unwanted, park_choice, unpark_entries
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


def test_the_order_of_operations() -> None:
    down, up = Script(), Script()
    tensors = some()
    park_choice(choose(tensors), find_ways=down.ways)
    assert down.done == ["look", "synchronize", *["down"] * 7, "synchronize", *["resize"] * 7, "release"]
    unpark_entries(list(PARKED.values()), up.ways)
    two = ["resize", "resize", "up", "up"]
    assert up.done == ["synchronize", *two * 3, "resize", "up", "synchronize"]
    whole(tensors)


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
    # The last operation waits for the copies: what that fails for may not be there yet.
    assert at == 15 or not any(entry.storage.nbytes() or entry.arriving for entry in PARKED.values())
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


# --- what is refused, and what is told ----------------------------------------------------------------------


def test_what_was_moved_is_told_by_owner_with_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(transfer.time, "perf_counter", lambda: float(next(seconds)))
    model = torch.nn.Linear(3, 2)
    theirs = torch.frombuffer(bytearray(8), dtype=torch.uint8)
    parked = park_choice(choose([model, theirs]))
    assert (parked.nbytes, parked.storages, parked.owners) == (32, 2, {"parameter": 32})
    assert parked.serials == {entry.serial for entry in PARKED.values()}
    assert [(each.name, each.nbytes) for each in parked.refused] == [("tensor", 8)]
    assert (parked.seconds, parked.host_seconds, parked.copy_seconds) == (3, 1, 1)
    assert [(entry.title, entry.nbytes) for entry in PARKED.values()] == [
        ("parameter 'weight'", 24), ("parameter 'bias'", 8),
    ]  # fmt: skip
    moved = parked.unpark()
    assert (moved.nbytes, moved.storages, moved.owners, moved.seconds) == (32, 2, {"parameter": 32}, 1)


def test_each_call_brings_back_once_what_is_still_parked_of_it() -> None:
    first, second, third = torch.ones(5), torch.ones(6), torch.ones(7)
    one, other = park_choice(choose([first, second])), park_choice(choose([third]))
    unpark_entries([PARKED[first.untyped_storage()._cdata]])
    assert one.unpark().nbytes == 24
    assert [entry.nbytes for entry in PARKED.values()] == [28]
    with pytest.raises(ParkError, match=r"^nothing of what was given is parked \(brought back already\?\)$"):
        one.unpark()
    assert other.unpark().nbytes == 28
    with pytest.raises(KeyError), park_choice(choose([first, second])):
        unpark_entries([PARKED[first.untyped_storage()._cdata]])
        raise KeyError
    assert not PARKED
    with park_choice(choose([first])) as parked:
        parked.unpark()


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (1, "tensor is parked already; nothing was moved"),
        (2, "tensor, tensor are parked already; nothing was moved"),
        (3, "tensor, tensor, tensor are parked already; nothing was moved"),
        (4, "tensor, tensor, tensor and 1 more are parked already; nothing was moved"),
        (6, "tensor, tensor, tensor and 3 more are parked already; nothing was moved"),
    ],
)
def test_what_is_parked_already_is_refused_and_nothing_moves(count: int, told: str) -> None:
    tensors = some()
    park_choice(choose(tensors[:count]))
    with pytest.raises(ParkError) as caught:
        park_choice(choose(tensors))
    assert str(caught.value) == f"{told}. Call unpark() first, or park what is left"
    assert len(PARKED) == count
    park_choice(choose(tensors[count:]))
    whole(tensors)


def test_a_device_that_is_neither_is_refused() -> None:
    class Strange:
        """As much of a storage as is asked."""

        _cdata = -1
        device = torch.device("xpu:1")

        def nbytes(self) -> int:
            return 4

    choice = choose([torch.ones(1)])
    choice.storages[0].storage = Strange()  # type: ignore[assignment]
    with pytest.raises(ParkError) as caught:
        park_choice(choice)
    assert str(caught.value) == "tensor is on xpu:1: only CUDA devices are supported"


def test_empty_storages_are_nothing_to_park() -> None:
    assert park_choice(choose([torch.empty(0)])).storages == 0


def test_with_cuda_what_is_on_the_host_is_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.cuda, "initialized", lambda: True)
    assert park_choice(choose(some())).storages == 0
    assert not PARKED


def test_a_storage_that_was_refilled_is_not_overwritten() -> None:
    mine, other = torch.arange(10.0), torch.arange(5.0)
    storage = mine.untyped_storage()
    park_choice(choose([mine, other]))
    storage.resize_(40)
    storage.fill_(7)
    with pytest.raises(ParkError, match=r"^tensor got device memory from somebody else while parked"):
        unpark_entries(list(PARKED.values()))
    assert len(PARKED) == 2
    storage.resize_(0)
    unpark_entries(list(PARKED.values()))
    assert torch.equal(mine, torch.arange(10.0))


def test_an_unpark_that_failed_says_what_is_back_and_what_is_not() -> None:
    tensors = some()
    park_choice(choose(tensors))
    script = Script(7, MemoryError)
    with pytest.raises(MemoryError) as caught:
        unpark_entries(list(PARKED.values()), script.ways)
    assert caught.value.__notes__ == [
        "memtriage.unpark: 2 of 7 storages (800 B) are back on the device; 5 (2.0 KiB) are still parked, "
        "their values whole on the host: make room and call unpark() again"
    ]
    whole(tensors)


def test_a_parking_that_failed_half_way_says_what_is_parked() -> None:
    tensors = some()
    with pytest.raises(MemoryError) as caught:
        park_choice(choose(tensors), find_ways=Script(14, MemoryError).ways)
    assert caught.value.__notes__ == [
        "memtriage.park: 4 of 7 storages (1.6 KiB) are parked (unpark() brings them back); what is not is on "
        "the device, as it was"
    ]
    assert len(PARKED) == 4
    whole(tensors)


def test_what_nobody_holds_any_more_is_dropped() -> None:
    kept, gone = torch.ones(100), torch.ones(1000)
    park_choice(choose([kept, gone]))
    reference = weakref.ref(gone)
    del gone
    gc.collect()
    assert reference() is None
    assert unpark_entries(list(PARKED.values())).nbytes == 400
    assert ARENAS[False].used == 0


def test_storage_that_died_while_parked_frees_its_host_memory() -> None:
    ARENAS[False].release()
    owned = set()
    for _ in range(3):  # a model a cycle, none of them brought back
        park_choice(choose([torch.ones(1 << 18)]))
        owned.add(ARENAS[False].owned)
    assert len(owned) == 1
    forget_unwanted()
    assert ARENAS[False].release() == owned.pop()
    assert ARENAS[False].owned == 0
