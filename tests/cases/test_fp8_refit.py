"""The case `fp8_refit`: its loop on the CPU, and what it decides without a device."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.blocks import DEFAULT_POOL, Block, Segment
from memtriage.model.census import StorageRecord
from memtriage.prove.trials import read_trials
from support.paths import named

CASE = Path(__file__).parents[2] / "cases" / "fp8_refit"
NAMES = [path.stem for path in CASE.glob("*.py")]
ON_CPU = ["--device", "cpu", "--tiny", "--library", "standin", "--steps", "2"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def case() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the case, which is a folder of scripts and no package."""
    hidden = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(CASE))
    yield importlib.import_module
    sys.path.remove(str(CASE))
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


@pytest.fixture
def settings_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loop fixes the order of sums for its process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def run(
    case: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    settings_restored: None,
) -> Callable[..., str]:
    """Runs the loop in this process and returns what it printed."""

    def run_loop(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["loop.py", *ON_CPU, *arguments])
        case("loop").main()
        return capfd.readouterr().out

    return run_loop


def losses(printed: str) -> list[str]:
    return re.findall(r"loss ([0-9.e+-]+)", printed)


@pytest.mark.parametrize(
    "treatment",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("clear-all", "compact")), "memtriage"],
)
def test_treatments_change_no_loss_and_fp8_does(run: Callable[..., str], treatment: str) -> None:
    plain = losses(run("--engine", "inside", "--treatment", "none"))
    assert len(plain) == 2
    assert plain[0] != plain[1]
    assert losses(run("--engine", "inside", "--treatment", treatment)) == plain
    assert losses(run("--engine", "inside", "--steps", "1", "--precision", "bf16")) != plain[:1]


def test_two_treatments_take_turns(run: Callable[..., str]) -> None:
    printed = run("--engine", "inside", "--steps", "5", "--treatment", "none", "--against", "memtriage")
    whose = re.findall(r"turn \d: (\S+) [0-9.]+ s", printed)
    assert whose == ["none", "memtriage", "none", "memtriage"]
    assert re.search(r"memtriage / none: [0-9.]+, the median of 1 pairs of turns", printed)


@pytest.mark.long
def test_who_takes_turns_changes_no_loss(run: Callable[..., str]) -> None:
    turns = ("--engine", "inside", "--steps", "5", "--treatment", "none", "--against")
    assert losses(run(*turns, "memtriage")) == losses(run(*turns, "clear"))


def test_turns_are_balanced(case: Callable[[str], ModuleType]) -> None:
    whose = [case("treatment").InTurns.whose(turn) for turn in range(10)]
    assert whose == [0, 1, 0, 1, 1, 0, 0, 1, 1, 0]


def test_engine_in_its_own_process_gets_every_weight(run: Callable[..., str]) -> None:
    # The loop itself compares the sums of the weights on both sides.
    assert len(losses(run("--steps", "1", "--engine", "process"))) == 1


def test_an_error_in_the_engine_stops_the_trainer(case: Callable[[str], ModuleType]) -> None:
    generation = case("engine").make(torch.device("cpu"), "process")
    with pytest.raises(RuntimeError, match="KeyError: 'unknown'"):
        piece = case("engine").Piece("unknown", 0, torch.Size((2,)), torch.float32)
        generation.send(torch.zeros(8, dtype=torch.uint8), [piece])
        generation.acknowledged()
    generation.close()


def test_a_weight_that_is_not_sent_is_noticed(
    run: Callable[..., str], case: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = case("engine")

    def take_none(self: object, bucket: object, pieces: object) -> None:
        """A refit that delivers nothing."""

    monkeypatch.setattr(engine.Engine, "take", take_none)
    with pytest.raises(RuntimeError, match="the engine's weights sum to"):
        run("--engine", "inside")


class TestWorkspaces:
    def test_they_outlive_the_step_until_cleared(self, case: Callable[[str], ModuleType]) -> None:
        fp8, model = case("fp8"), case("model")
        device = torch.device("cpu")
        made = fp8.blocks("standin", True, device, torch.float32)
        decoder = model.Decoder(model.TINY, made, device, torch.float32)
        decoder(torch.zeros(1, 16, dtype=torch.long), True)
        linear_layers = sum(isinstance(module, fp8.StandInLinear) for module in decoder.modules())
        assert fp8.clear_workspaces(decoder) == linear_layers
        assert fp8.clear_workspaces(decoder) == 0

    def test_later_micro_batches_use_the_kept_copy(self, case: Callable[[str], ModuleType]) -> None:
        linear = case("fp8").StandInLinear(16, 16, device="cpu", dtype=torch.float32)
        x = torch.ones(1, 16)
        before = linear(x, True)
        with torch.no_grad():
            linear.weight.mul_(2)
        torch.testing.assert_close(linear(x, False), before)
        assert not torch.allclose(linear(x, True), before)

    def test_the_rotary_cache_holds_each_length(self, case: Callable[[str], ModuleType]) -> None:
        rotary = case("model").RotaryEmbedding(16, torch.device("cpu"))
        assert rotary(32) is rotary(32)
        assert rotary(32) is not rotary(48)
        rotary.forward.cache_clear()


class TestMicroBatches:
    @given(
        count=st.integers(1, 50),
        budget=st.integers(64, 20_000),
        multiple=st.sampled_from([8, 16, 64]),
        seed=st.integers(0, 10_000),
    )
    def test_keep_to_the_budget(
        self, case: Callable[[str], ModuleType], count: int, budget: int, multiple: int, seed: int
    ) -> None:
        longest = budget // multiple * multiple
        made = case("lengths").micro_batches(count, budget, longest, multiple, seed)
        assert len(made) == count
        assert all(item.tokens <= budget and item.length % multiple == 0 for item in made)
        assert made == case("lengths").micro_batches(count, budget, longest, multiple, seed)


class TestPack:
    @given(sizes=st.lists(st.integers(1, 4096), max_size=30), room=st.integers(16_384, 40_000))
    def test_every_weight_once_in_order_and_none_overlaps(
        self, case: Callable[[str], ModuleType], sizes: list[int], room: int
    ) -> None:
        weights = [(str(index), torch.empty(size)) for index, size in enumerate(sizes)]
        refit = case("refit")
        buckets = list(refit.pack(refit.pieces_of(weights), room))
        assert [weight.name for bucket in buckets for weight in bucket] == [name for name, _ in weights]
        for bucket in buckets:
            ends = [weight.start + weight.nbytes for weight in bucket]
            assert ends[-1] <= room
            assert all(end <= one.start for end, one in zip(ends, bucket[1:], strict=False))

    def test_a_weight_larger_than_a_bucket_is_refused(self, case: Callable[[str], ModuleType]) -> None:
        refit = case("refit")
        with pytest.raises(ValueError, match="make it larger"):
            list(refit.pack(refit.pieces_of([("big", torch.empty(100))]), 64))


class TestWhoHolds:
    def segment(self, address: int, *blocks: tuple[int, bool]) -> Segment:
        made, start = [], address
        for nbytes, live in blocks:
            state = "active" if live else "free"
            made.append(Block(address=start, size=nbytes, requested=nbytes if live else 0, state=state))
            start += nbytes
        return Segment(
            device=0,
            address=address,
            size=start - address,
            stream=0,
            pool=DEFAULT_POOL,
            expandable=False,
            blocks=tuple(made),
        )

    def test_strands_are_told_by_who_keeps_them(self, case: Callable[[str], ModuleType]) -> None:
        who = case("who_holds")
        segments = [
            self.segment(0x10000000, (4 * MIB, True), (96 * MIB, False)),
            self.segment(0x20000000, (4 * MIB, True), (60 * MIB, False), (32 * MIB, True)),
            self.segment(0x30000000, (80 * MIB, False)),
        ]
        records = [
            record(0x10000000, 4 * MIB, "functools.lru_cache RotaryEmbedding.forward[*]", "known cache"),
            record(0x20000000, 4 * MIB, "loop.model.layers[*].qkv._fp8_workspaces['weight']._data"),
        ]
        made = who.table("after refit", segments, records)
        shares = {share.owner: share for share in made.shares}
        assert made.allocated == 40 * MIB
        assert made.reserved == 276 * MIB
        assert shares["rotary embeddings by length"].strands_alone == 96 * MIB
        assert shares["FP8 weight workspaces"].strands_with_others == 60 * MIB
        assert shares["workspaces of cuBLAS"].nbytes == 32 * MIB
        assert [segment.free for segment in made.worst] == [96 * MIB, 60 * MIB]


def record(address: int, nbytes: int, holder: str, owner: str = "variable") -> StorageRecord:
    return StorageRecord(device="cuda:0", address=address, nbytes=nbytes, owner=owner, path=named(holder))


@pytest.mark.parametrize(("file", "ranks"), [("trials.toml", 1), ("trials_two_gpus.toml", 2)])
def test_the_trials_name_the_five_rows_and_their_targets(file: str, ranks: int) -> None:
    trials = read_trials(CASE / file)
    assert trials.ranks == ranks
    assert trials.names == ["bf16", "fp8", "fp8-clear", "fp8-clear-expandable", "fp8-memtriage"]
    assert {target.metric for target in trials.targets} == {"allocated", "reserved", "time_per_step", "loss"}
    assert all(target.variant == "fp8-memtriage" for target in trials.targets)


@pytest.mark.parametrize("file", ["trials.toml", "trials_two_gpus.toml"])
def test_measuring_reports_later_steps_of_the_same_trials(
    case: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    measure = case("measure")
    asked = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append((read_trials(Path(command[4])), command[5:]))
        return subprocess.CompletedProcess(command, 0, json.dumps({"variants": [], "targets": []}))

    monkeypatch.setattr(measure.subprocess, "run", run)
    found = measure.compared(file, tmp_path, limit_s=1)
    (first, ran), (later, reported) = asked
    assert ran == ["-o", str(tmp_path / "trials"), "--json"]
    assert reported == [*ran, "--report"]
    assert (first.warmup, later.warmup) == (1, measure.FIRST_TIMES)
    assert first.script == later.script == CASE / "loop.py"
    assert first.variants == later.variants
    steps = [int(variant.args[-1]) for variant in first.variants if variant.name in ("fp8", "fp8-memtriage")]
    assert all(number > measure.FIRST_TIMES + 1 for number in steps)
    assert found["later"]["targets"] == []


@pytest.fixture
def simulated(
    case: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, settings_restored: None
) -> Callable[..., list[Any]]:
    """Runs the simulated loop; readings after each step's refit."""

    def run_simulation(*arguments: str) -> list[Any]:
        monkeypatch.setattr(sys, "argv", ["simulate.py", *arguments])
        return case("simulate").after_refits(case("simulate").arguments())

    return run_simulation


def test_small_survivors_strand_large_segments(simulated: Callable[..., list[Any]]) -> None:
    """What the case is about, by the simulated allocator: clearing frees the bytes, not the segments."""
    shared = ["--layers", "1", "--micro-batches", "3", "--steps", "2"]
    kept, cleared = simulated(*shared)[-1], simulated(*shared, "--treatment", "clear")[-1]
    assert cleared.allocated < kept.allocated / 2
    assert cleared.reserved > 10 * cleared.allocated
    assert cleared.peak > cleared.reserved and kept.peak > kept.reserved


def test_memtriage_leaves_nothing_and_primes(simulated: Callable[..., list[Any]]) -> None:
    shared = ["--layers", "1", "--micro-batches", "3", "--steps", "2", "--treatment"]
    unprimed, primed = simulated(*shared, "memtriage-unprimed"), simulated(*shared, "memtriage")
    assert unprimed[0] == primed[0]
    assert unprimed[1].peak != primed[1].peak
    assert all(reading.reserved == 2 * MIB for reading in unprimed + primed)


def test_copies_apart_are_in_segments_of_their_own(simulated: Callable[..., list[Any]]) -> None:
    shared = ["--layers", "1", "--micro-batches", "3", "--steps", "1"]
    together, apart = simulated(*shared)[0], simulated(*shared, "--apart")[0]
    assert apart.allocated == pytest.approx(together.allocated, rel=0.02)
    assert apart.reserved < 0.8 * together.reserved
