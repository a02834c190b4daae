"""Phases: what their end does, in which order, what it prints, and what it tells a watch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memtriage
from memtriage import PhasePolicy
from memtriage.diagnose.residue import ResiduePolicy
from memtriage.model.census import StorageRecord
from memtriage.model.findings import Finding
from memtriage.model.holders import AllocatorFigures
from memtriage.process import active
from memtriage.treat import phase as phase_module
from memtriage.treat.parking import transfer
from memtriage.treat.parking.api import is_parked
from memtriage.treat.parking.device import Ways
from memtriage.treat.phase import phase_end
from support.paths import named

GIB = 1 << 30
MIB = 1 << 20
QUIET = PhasePolicy(clear=False, residue=None)


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transfer.cuda, "initialized", lambda: False)
    phase_module._known.clear()
    yield
    if is_parked():
        memtriage.unpark()
    memtriage.release_parking()
    phase_module._known.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, AllocatorFigures]:
    """Figures of a GPU, for tests to change."""
    figures = {"cuda:0": AllocatorFigures(allocated=9_556_302_234, reserved=27_917_287_424)}
    monkeypatch.setattr(phase_module, "allocator_figures", lambda: dict(figures))
    return figures


@pytest.fixture
def census(monkeypatch: pytest.MonkeyPatch) -> list[StorageRecord]:
    """What a census finds, for tests to fill in."""
    records: list[StorageRecord] = []
    take = lambda: SimpleNamespace(storages=records)  # noqa: E731
    monkeypatch.setattr("memtriage.account.census.take_census", take)
    monkeypatch.setattr(phase_module, "read_holders", lambda scene, chosen: [])
    return records


class Watch:
    """Stands for a session: notes what it is told."""

    def __init__(self) -> None:
        self.marks: list[str] = []
        self.findings: list[Finding] = []

    def mark(self, name: str) -> None:
        self.marks.append(name)

    def residue(self, findings: list[Finding]) -> None:
        self.findings += findings


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(active, "session", made)
    return made


def test_each_device_has_the_line_that_people_search_for(
    device: dict[str, AllocatorFigures], capsys: pytest.CaptureFixture[str]
) -> None:
    device["cuda:1"] = AllocatorFigures(allocated=GIB // 2, reserved=None)
    with memtriage.phase("refit", QUIET):
        pass
    assert capsys.readouterr().out.splitlines() == [
        "GPU Memory after refit: 8.90GB allocated, 26.00GB reserved",
        "GPU Memory after refit: 0.50GB allocated, n/a reserved",
    ]


def test_without_a_gpu_it_tells_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    with memtriage.phase("rollout", PhasePolicy(residue=None)) as phase:
        pass
    assert re.fullmatch(r"Host Memory after rollout: \d+\.\d\dGB resident\n", capsys.readouterr().out)
    assert phase.report is not None
    assert phase.report.cleared is not None
    assert set(phase.report.parts) == {"parking", "clearing caches", "compaction", "looking for residue"}
    assert 0 < sum(phase.report.parts.values()) <= phase.report.seconds


def test_the_log_can_go_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    phase_end("train", replace(QUIET, log=said.append))
    assert capsys.readouterr().out == ""
    assert said[0].startswith("Host Memory after train: ")


def test_named_objects_are_parked_between_phases() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    policy = PhasePolicy(unpark=(model, optimizer), park=(model, optimizer), clear=False, residue=None)
    for _ in range(3):
        with memtriage.phase("train", policy):
            assert not is_parked()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.weight.untyped_storage().nbytes() == 0
        assert is_parked(model) and is_parked(optimizer)


def test_a_trial_can_switch_it_off(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    monkeypatch.setenv("MEMTRIAGE_PHASE", "off")
    model, said = nn.Linear(4, 4), list[str]()
    report = phase_end("train", PhasePolicy(park=(model,), residue=None, log=said.append))
    assert not is_parked()
    assert (report.cleared, report.parked, report.compaction) == (None, None, None)
    assert watch.marks == ["after train"]
    assert said[0].startswith("Host Memory after train: ")
    monkeypatch.setenv("MEMTRIAGE_PHASE", "on")
    phase_end("train", PhasePolicy(park=(model,), clear=False, residue=None, log=said.append))
    assert is_parked(model)


def test_what_is_parked_already_stays_so() -> None:
    first, second = torch.ones(3), torch.ones(5)
    memtriage.park(first)
    report = phase_end("train", replace(QUIET, park=(first, second)))
    assert report.parked is not None
    assert report.parked.nbytes == 20
    assert phase_end("train", replace(QUIET, park=(first, second))).parked is None


def test_an_exception_of_the_block_passes_and_the_end_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.ones(3)
    with pytest.raises(ZeroDivisionError), memtriage.phase("train", replace(QUIET, park=(tensor,))):
        1 / 0  # noqa: B018
    assert is_parked(tensor)
    assert "after train" in capsys.readouterr().out


def test_a_part_that_fails_is_told_and_raised_after_the_rest(
    capsys: pytest.CaptureFixture[str], watch: Watch
) -> None:
    with (
        pytest.raises(memtriage.ParkError, match="no owner"),
        memtriage.phase("train", replace(QUIET, park=("weights",))),
    ):
        pass
    out = capsys.readouterr().out
    assert out.startswith("Host Memory after train: ")
    assert "\n  parking failed: ParkError: no owner is called 'weights'" in out
    assert watch.marks == ["after train"]


def test_a_failing_end_does_not_hide_the_exception_of_the_block() -> None:
    with pytest.raises(ZeroDivisionError), memtriage.phase("train", replace(QUIET, park=("weights",))):
        1 / 0  # noqa: B018


def test_known_caches_are_cleared_and_garbage_is_collected() -> None:
    cache = {"big": torch.ones(1000)}
    registration = memtriage.register_holder("mine", lambda: cache, cache.clear)
    try:
        report = phase_end("train", PhasePolicy(residue=None))
        assert not cache
        assert report.cleared is not None
        assert [outcome.name for outcome in report.cleared.cleared] == ["mine"]
        cache["again"] = torch.ones(1000)
        assert phase_end("train", QUIET).cleared is None
        assert cache
        phase_end("train", PhasePolicy(clear=("mine",), residue=None))
        assert not cache
    finally:
        registration.remove()


def test_caches_are_cleared_once_while_parking_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    clear, down = phase_module.clear_holders, Ways.down

    def noted_clear(kinds: Any, *, idle: bool, **options: Any) -> Any:
        done.append(f"clear, idle {idle}")
        return clear(kinds, idle=idle, **options)

    def noted_copy(way: Ways, storage: Any, home: Any) -> None:
        done.append("copy")
        down(way, storage, home)

    monkeypatch.setattr(phase_module, "clear_holders", noted_clear)
    monkeypatch.setattr(Ways, "down", noted_copy)
    monkeypatch.setattr(Ways, "synchronize", lambda way: done.append("synchronize"))
    tensor = torch.ones(3)
    policy = PhasePolicy(park=(tensor,), residue=None)
    report = phase_end("train", policy)
    assert done[:4] == ["synchronize", "copy", "clear, idle True", "synchronize"]
    assert not any("clear" in each for each in done[4:])
    assert report.cleared is not None
    assert report.parked is not None
    done.clear()
    assert phase_end("again", policy).parked is None  # nothing is left to copy
    with pytest.raises(memtriage.ParkError):
        phase_end("failing", replace(policy, park=("weights",)))
    assert done == ["clear, idle False"] * 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"park": nn.Linear(1, 1)}, r"PhasePolicy\(park=\.\.\.\) takes a tuple .*; got Linear"),
        ({"unpark": "parameters"}, r"PhasePolicy\(unpark=\.\.\.\) takes a tuple .*; got str"),
        ({"clear": "workspace"}, r"PhasePolicy\(clear='workspace'\): give True, False or a tuple"),
        ({"clear": (1,)}, "give True, False or a tuple"),
        ({"compact": None}, r"PhasePolicy\(compact=None\): give True or False"),
    ],
)
def test_a_policy_tells_what_is_wrong_with_it(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        PhasePolicy(**settings)


def test_the_defaults_are_those_that_the_page_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "phase.md").read_text(encoding="utf-8")
    rows = page.partition("| `PhasePolicy(...)` | default |")[2].partition("\n\n")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", rows, re.MULTILINE))
    documented["residue"] = repr(ResiduePolicy())
    names = {field.name for field in fields(PhasePolicy)} - {"log"}  # it prints
    assert documented == {name: repr(getattr(PhasePolicy(), name)) for name in names}


@pytest.mark.parametrize("name", ["", "two\nlines", 3])
def test_a_phase_needs_a_name(name: Any) -> None:
    with pytest.raises(ValueError, match="a phase needs a name"):
        memtriage.phase(name)


# Residue


def held(nbytes: int, owner: str = "variable", holder: str = "train.kept[*]") -> StorageRecord:
    return StorageRecord(device="cuda:0", address=nbytes, nbytes=nbytes, owner=owner, path=named(holder))


def test_what_stays_is_told_with_its_holder(
    device: dict[str, AllocatorFigures],
    census: list[StorageRecord],
    watch: Watch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    census += [
        held(3 * GIB, "known cache", "model.layers[*].workspaces[*]"),
        held(GIB, "saved for backward", "train.losses[*] -> grad_fn MulBackward0 -> saved self"),
        held(5 * GIB, "parameter", "model.weight"),
        held(100, "variable", "train.loss"),
    ]
    report = phase_end("train", PhasePolicy(park=(torch.ones(1),), clear=False))
    assert report.looked
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  cuda:0: 3.0 GiB known cache kept alive by model.layers[*].workspaces[*]",
        "  cuda:0: 1.0 GiB saved for backward kept alive by "
        "train.losses[*] -> grad_fn MulBackward0 -> saved self",
    ]
    assert watch.marks == ["after train"]
    assert [(finding.kind, finding.bytes, finding.holder, finding.phase) for finding in watch.findings] == [
        ("residue", 3 * GIB, "model.layers[*].workspaces[*]", "train"),
        ("residue", GIB, "train.losses[*] -> grad_fn MulBackward0 -> saved self", "train"),
    ]


def test_ranks_are_named(
    device: dict[str, AllocatorFigures],
    census: list[StorageRecord],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    census.append(held(GIB, "known cache"))
    phase_end("train", PhasePolicy(park=(torch.ones(1),), clear=False))
    assert "\n  rank 3, cuda:0: 1.0 GiB known cache kept alive by " in capsys.readouterr().out


def test_no_census_is_taken_without_need(
    device: dict[str, AllocatorFigures], census: list[StorageRecord]
) -> None:
    policy = PhasePolicy(park=(torch.ones(1),), clear=False)
    device["cuda:0"] = AllocatorFigures(allocated=3 * MIB, reserved=GIB)
    assert not phase_end("train", policy).looked
    device["cuda:0"] = AllocatorFigures(allocated=900 * MIB, reserved=GIB)
    assert phase_end("train", policy).looked
    assert not phase_end("train", policy).looked  # no more than when it looked last
    assert phase_end("other", policy).looked
    device["cuda:0"] = AllocatorFigures(allocated=945 * MIB, reserved=GIB)
    assert not phase_end("train", policy).looked
    device["cuda:0"] = AllocatorFigures(allocated=955 * MIB, reserved=GIB)
    assert phase_end("train", policy).looked
    assert not phase_end("train", PhasePolicy(clear=False, residue=None)).looked


def test_a_phase_that_parks_nothing_asks_only_for_what_came(
    device: dict[str, AllocatorFigures], census: list[StorageRecord]
) -> None:
    census += [held(GIB, "variable"), held(GIB + 1, "saved for backward", "train.loss -> grad_fn")]
    with memtriage.phase("train", PhasePolicy(clear=False)) as phase:
        pass
    assert phase.report is not None and not phase.report.looked
    with memtriage.phase("train", PhasePolicy(clear=False)) as phase:
        device["cuda:0"] = AllocatorFigures(allocated=12 * GIB, reserved=30 * GIB)
    assert phase.report is not None
    assert [row.name for row in phase.report.residue] == ["train.loss -> grad_fn"]


@functools.lru_cache(maxsize=4)
def table(length: int) -> Tensor:
    return torch.ones(length)


def test_a_watched_run_has_the_residue_as_its_verdict(tmp_path: Path) -> None:
    """With a real census: what an `lru_cache` keeps past the phase, on the CPU."""
    model = nn.Linear(256, 256)
    silent = PhasePolicy(log=lambda text: None)
    with memtriage.watch(tmp_path, quiet=True) as watch, memtriage.phase("train", silent):
        (model(torch.ones(2, 256)).sum() * table(6 * MIB)[0]).backward()
        memtriage.step()
    table.cache_clear()
    assert watch.report is not None
    found = [finding for finding in watch.report.findings if finding.kind == "residue"]
    assert [(line.bytes, line.device, line.phase) for line in found] == [(24 * MIB, "cpu", "train")]
    assert found[0].holder is not None
    assert found[0].holder.startswith("generic.lru_cache: ")
    assert "table" in found[0].holder
    assert "memtriage.register_holder" in (found[0].fix or "")
    assert watch.report.verdict == "residue"
    assert {mark.name for mark in watch.report.marks} >= {"after train", "step"}
