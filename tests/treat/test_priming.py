"""`memtriage.prime`: where the choice comes from, and what is done with it on a device."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from tests.support.primed_training import QUICK, build
from torch import nn
from torch.optim import optimizer as torch_optimizer

import memtriage
from memtriage.allocator.events import OutOfMemory
from memtriage.model.priming import Priming, PrimingCheck, StatePool
from memtriage.planning import priming as planning
from memtriage.treat import priming as treat
from memtriage.treat.priming import FILE, StatePools, allocate, begin_primed, read_priming
from support.simulated_memory import SimulatedBlocks

MIB = 1 << 20


def chosen() -> Priming:
    return Priming(
        blocks=[64 * MIB, 20 * MIB],
        allocated=80 * MIB,
        reserved_before=100 * MIB,
        reserved_after=84 * MIB,
        steps=40,
        checks=[PrimingCheck(name="40 steps", before=98 * MIB, after=82 * MIB)],
        seconds=1.0,
    )


def test_all_blocks_are_live_at_once_and_none_stays() -> None:
    source = SimulatedBlocks(1 << 30)
    assert allocate([64 * MIB, 20 * MIB], source) is None
    assert (source.simulator.reserved, source.simulator.allocated) == (84 * MIB, 0)
    assert source.peaks_forgotten == 1


def test_too_little_memory_leaves_the_device_as_it_was() -> None:
    source = SimulatedBlocks(70 * MIB)
    failure = allocate([64 * MIB, 20 * MIB], source)
    assert failure is not None
    assert "out of memory" in failure
    assert (source.simulator.reserved, source.simulator.allocated) == (0, 0)
    with pytest.raises(OutOfMemory):
        source.simulator.malloc(71 * MIB)


@pytest.fixture(scope="module")
def quick_choice() -> Iterator[tuple[Priming, list[bool]]]:
    """`prime(build)` with a short search, and whether random states were the same afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning.plan_priming, "__kwdefaults__", {
            **(planning.plan_priming.__kwdefaults__ or {}), "policy": QUICK,
        })  # fmt: skip
        before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1]
        priming = memtriage.prime(build)
        yield (
            priming,
            [
                random.getstate() == before[0],
                torch.equal(torch.get_rng_state(), before[1]),
                numpy.array_equal(numpy.random.get_state()[1], before[2]),
            ],
        )


def test_a_program_is_predicted_and_random_states_stay(
    quick_choice: tuple[Priming, list[bool]],
) -> None:
    priming, kept = quick_choice
    assert priming.helps
    assert priming.reserved_after < 0.97 * priming.reserved_before
    assert priming.allocated <= priming.reserved_after
    assert priming.steps == 40
    assert all(check.after <= 1.005 * check.before for check in priming.checks)
    assert {check.name for check in priming.checks} >= {"shorter batches", "evaluation after each step"}
    assert kept == [True, True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to prime")
def test_without_cuda_nothing_is_allocated(quick_choice: tuple[Priming, list[bool]]) -> None:
    priming, _ = quick_choice
    assert not priming.primed
    assert priming.notes[-1] == "CUDA is not available here: nothing was allocated"


def test_the_choice_of_an_earlier_run_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "0"
    folder.mkdir(parents=True)
    said: list[str] = []
    begin_primed(Priming(reason="nothing helps"), folder, said.append)
    assert said == ["--prime: priming would not help: nothing helps"]
    assert memtriage.prime(run=tmp_path).reason == "nothing helps"
    (folder / FILE).write_bytes(msgspec.json.encode(chosen()))
    assert memtriage.prime(run=tmp_path).blocks == chosen().blocks


def test_a_run_without_a_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recorded by `memtriage run --prime`"):
        memtriage.prime(run=tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        memtriage.prime(run=tmp_path)


def test_exactly_one_source_is_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing given; expected one of build, snapshot and run"):
        memtriage.prime()
    with pytest.raises(ValueError, match="snapshot and run given"):
        memtriage.prime(snapshot="a.pickle", run=tmp_path)


@pytest.mark.parametrize("capacity", [1 << 30, 70 * MIB])
def test_settings_are_changed_along_with_the_blocks(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    done: list[str] = []
    source = SimulatedBlocks(capacity)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", done.append)
    monkeypatch.setattr(treat, "CudaBlocks", lambda index: source)
    priming = chosen()
    priming.settings = "large_segment_size_mb:512"
    priming.allocator_conf = "garbage_collection_threshold:0.8"
    treat.prime_device(priming, 0)
    own, both = priming.allocator_conf, f"{priming.allocator_conf},{priming.settings}"
    fits = capacity > 84 * MIB
    assert priming.primed == fits
    assert done == ([both] if fits else [both, own])


@pytest.mark.parametrize("possible", [True, False])
def test_pools_come_along_with_the_blocks_or_nothing_does(
    monkeypatch: pytest.MonkeyPatch, possible: bool
) -> None:
    source = SimulatedBlocks(1 << 30)
    installed: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(treat, "CudaBlocks", lambda index: source)
    monkeypatch.setattr(treat, "pools_possible", lambda: possible)
    monkeypatch.setattr(treat.StatePools, "install", lambda self: installed.append(self))
    priming = chosen()
    priming.pools = [StatePool(size=30 * MIB, parameters=15 * MIB)]
    priming.reserved_without_pools = 90 * MIB
    treat.prime_device(priming, 0)
    assert priming.primed == possible
    assert len(installed) == possible
    assert source.simulator.reserved == (84 * MIB if possible else 0)
    assert "2 blocks of 84.0 MiB in all and 30.0 MiB for the optimizer's states" in priming.in_words()
    assert priming.in_words().endswith("of allocated), 90.0 MiB if no pool can be made")


def test_settings_alone_help() -> None:
    priming = chosen()
    priming.blocks, priming.settings = [], "large_segment_size_mb:512"
    assert priming.helps
    assert priming.in_words().startswith("large_segment_size_mb:512; expected reserved 84.0 MiB")


def test_priming_waits_for_cuda_and_reports_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is there: the call waits in torch's own queue until CUDA begins."""
    queued: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    devices: list[int | None] = []

    def prime_device(priming: Priming, device: int | None = None, *_: Any) -> Priming:
        devices.append(device)
        raise RuntimeError("no driver")

    monkeypatch.setattr(treat, "prime_device", prime_device)
    monkeypatch.setenv("LOCAL_RANK", "3")
    said: list[str] = []
    begin_primed(chosen(), tmp_path, said.append)
    assert (len(queued), devices) == (1, [])
    queued[0]()
    assert devices == [0]
    assert said[1] == "--prime: priming failed (RuntimeError: no driver)"
    assert read_priming(tmp_path).notes == ["priming failed (RuntimeError: no driver)"]


def test_a_snapshot_is_a_source() -> None:
    recorded = Path(__file__).parents[1] / "data" / "snapshots"
    file = next(iter(sorted(recorded.glob("fragmentation*.pickle*"))))
    priming = memtriage.prime(snapshot=file)
    assert priming.steps == 0
    assert priming.reserved_after <= priming.reserved_before
    assert priming.helps == (priming.reason is None)


MIB = 1 << 20


class Pool:
    """A pool that is only a size."""

    def __init__(self, size: int) -> None:
        self.size = size


class StandIn:
    """Makes pools, and notes which."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.made: list[int] = []
        self.entered: list[int] = []

    def make(self, size: int) -> Any:
        if size > self.capacity:
            return None
        self.made.append(size)
        return Pool(size)

    def inside(self, pool: Any) -> AbstractContextManager[object]:
        @contextmanager
        def context() -> Iterator[None]:
            self.entered.append(pool.size)
            yield

        return context()


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    yield
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


def trained(width: int, steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, width)).square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pool(width: int, size: int) -> StatePool:
    return StatePool(size=size, parameters=4 * width * width)


def test_the_states_of_an_optimizer_that_was_predicted_are_made_in_its_pool() -> None:
    plain = trained(8)
    source = StandIn()
    pools = StatePools([pool(8, 20 * MIB)], source)
    pools.install()
    assert trained(8) == plain
    assert (source.made, source.entered) == ([20 * MIB], [20 * MIB])
    trained(8)
    assert source.made == [20 * MIB]


def test_each_optimizer_has_its_own_whatever_their_order() -> None:
    source = StandIn()
    StatePools([pool(8, 20 * MIB), pool(16, 30 * MIB)], source).install()
    trained(16)
    trained(8)
    assert source.made == source.entered == [30 * MIB, 20 * MIB]


def test_another_optimizer_gets_none() -> None:
    source = StandIn()
    pools = StatePools([pool(8, 20 * MIB)], source)
    pools.install()
    trained(4)
    assert source.made == []
    pools.remove()


def test_without_memory_for_a_pool_states_are_made_as_ever() -> None:
    source = StandIn(capacity=10 * MIB)
    StatePools([pool(8, 20 * MIB)], source).install()
    assert trained(8) == trained(8)
    assert (source.made, source.entered) == ([], [])


def test_a_pool_is_dropped_when_the_states_are_made() -> None:
    alive: list[weakref.ref[Pool]] = []

    class Weak(StandIn):
        def make(self, size: int) -> Any:
            made = super().make(size)
            alive.append(weakref.ref(made))
            return made

    StatePools([pool(8, 20 * MIB)], Weak()).install()
    trained(8, steps=1)
    assert [reference() for reference in alive] == [None]
