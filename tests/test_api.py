"""The functions for use inside a program: `watch`, `mark`, `step`, `ledger`, `census`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memtriage
from memtriage.model.asked import Answer
from memtriage.model.report import RunReport
from memtriage.process import active
from memtriage.session import run as session_run
from memtriage.session.remote.ask import ask
from support import censuses

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def malloc_keeps_nothing() -> None:
    """What earlier tests have left with malloc is no finding about the test at hand."""
    memtriage.malloc_trim()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the environment of a launcher, or leaves a watch behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "MEMTRIAGE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    assert active.session is None or not active.session.running


@pytest.fixture
def no_census(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at something else: a census of all that pytest has in memory takes its time."""
    censuses.leave_out(monkeypatch)


def model_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(steps: int, after_step: Callable[[int], None] = lambda step: None) -> None:
    model, optimizer = model_and_optimizer()
    for step in range(steps):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)


def judged(watch: Any) -> RunReport:
    report = watch.report
    assert isinstance(report, RunReport)
    return report


def names(report: RunReport) -> list[str]:
    return [mark.name for mark in report.marks if mark.name != "time"]


# --- without a watch ----------------------------------------------------------------------------------------


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import memtriage
for name in ("predict", "plan", "horizon", "park", "BuildError"):
    try:
        getattr(memtriage, name)
    except ImportError as error:
        print(error.name, error.__cause__, error.__suppress_context__, str(error).partition(";")[0], sep="|")
"""


def test_without_torch_a_name_that_needs_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"torch|None|True|memtriage.{name} needs torch, and there is none in this environment"
        for name in ("predict", "plan", "horizon", "park", "BuildError")
    ]


def test_without_a_watch_marks_and_steps_do_nothing(tmp_path: Path) -> None:
    assert active.session is None
    memtriage.mark("after refit")
    memtriage.step()
    assert list(tmp_path.iterdir()) == []


# --- a watched block ----------------------------------------------------------------------------------------


def test_a_watched_block_has_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with memtriage.watch(tmp_path / "runs") as watch:
        assert watch.report is None
        train(2, lambda step: memtriage.mark(f"after refit {step}"))
    report = judged(watch)
    assert (report.verdict, report.steps, report.findings, report.exception) == ("not_judged", 2, [], None)
    expected = ["start", "backward", "step", "after refit 0", "backward", "step", "after refit 1", "end"]
    assert names(report) == expected
    assert sum(row.bytes for row in report.ledger["host"]) > 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("NOT JUDGED: 2 steps are too few, 12 are needed") == 1
    assert len(list((tmp_path / "runs").glob("*/0/rank-00000.jsonl"))) == 1


def test_a_quiet_watch_prints_nothing(no_census: None, capfd: pytest.CaptureFixture[str]) -> None:
    with memtriage.watch(quiet=True) as watch:
        train(4)
    assert capfd.readouterr() == ("", "")
    assert judged(watch).steps == 4


def test_a_watched_block_answers_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with memtriage.watch(tmp_path / "runs", listen=True):
        answers: list[Answer] = []
        asker = threading.Thread(target=lambda: answers.append(ask(os.getpid(), 60.0)))
        asker.start()
        while asker.is_alive():  # the main thread answers between two instructions
            sum(range(100))
    assert (answers[0].pid, answers[0].refused) == (os.getpid(), None)
    assert answers[0].ledgers and answers[0].objects > 1000
    assert not (tmp_path / "memtriage").exists()
    assert f"listening: `memtriage census --pid {os.getpid()}`" in capfd.readouterr().err


def test_the_record_goes_where_the_variable_says(
    no_census: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMTRIAGE_DIR", str(tmp_path / "elsewhere"))
    with memtriage.watch(quiet=True):
        memtriage.step()
    assert list(tmp_path.glob("elsewhere/*/0/rank-*.jsonl")) and not Path("memtriage-run").exists()


def test_watches_do_not_nest(no_census: None) -> None:
    with memtriage.watch(quiet=True) as outer:
        memtriage.step()
        with pytest.raises(RuntimeError, match="watched already") as error, memtriage.watch():
            pytest.fail("entered")  # pragma: no cover
        assert "remove the inner one" in str(error.value)
        memtriage.step()
    assert judged(outer).steps == 2


def test_one_watch_after_another_counts_anew(no_census: None) -> None:
    reports = []
    for steps in (3, 2):
        with memtriage.watch(quiet=True) as watch:
            train(steps)
        reports.append(judged(watch))
    assert [report.steps for report in reports] == [3, 2]
    assert [names(report).count("step") for report in reports] == [3, 2]


def installed() -> tuple[Any, ...]:
    """All that a watch installs."""
    from torch.optim import optimizer

    return (
        torch.autograd.backward,
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        list(sys.meta_path),
        {thread.name for thread in threading.enumerate()},
        tracemalloc.is_tracing(),
        torch.is_anomaly_enabled(),
        active.session,
    )


def test_a_watch_takes_away_what_it_installed(no_census: None) -> None:
    before = installed()
    with memtriage.watch(quiet=True) as watch:
        train(1)
        assert installed() != before
    assert installed() == before
    assert (judged(watch).verdict, judged(watch).steps) == ("not_judged", 1)


def test_a_watch_that_ends_amid_an_investigation_takes_its_recorders_away() -> None:
    before = installed()
    model, optimizer = model_and_optimizer()
    kept = []
    with memtriage.watch(quiet=True) as watch:
        for _ in range(12):
            kept.append(torch.zeros(100_000))
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
    assert installed() == before
    (finding,) = judged(watch).findings
    assert (finding.kind, finding.device) == ("leak", "cpu")
    assert "kept" in (finding.holder or "")
    assert finding.bytes_per_step == pytest.approx(400_000, rel=0.01)


# --- what counts as a step ----------------------------------------------------------------------------------


def test_steps_of_the_program_s_own_word_override_the_hooks(no_census: None) -> None:
    def foreign_steps() -> None:
        memtriage.step()

    with memtriage.watch(quiet=True) as watch:
        train(4, lambda step: foreign_steps())
        memtriage.step()
    assert judged(watch).steps == 5
    assert names(judged(watch)) == ["start", *["backward", "step"] * 4, "step", "end"]


def test_a_foreign_optimizer_s_steps_are_counted_by_hand(no_census: None) -> None:
    model, _ = model_and_optimizer()
    with memtriage.watch(quiet=True) as watch:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(8, 64)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
            memtriage.step()
    marks = [(mark.name, mark.step, mark.microbatch) for mark in judged(watch).marks][1:-1]
    marks_of_a_step = [("backward", 1), ("backward", 2), ("step", 2)]
    assert marks == [(name, i + (name == "step"), m) for i in range(3) for name, m in marks_of_a_step]


def test_several_optimizers_make_one_step(no_census: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    with memtriage.watch(quiet=True) as watch:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert judged(watch).steps == 3


def test_an_optimizer_inside_backward_makes_a_step(no_census: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def update(parameter: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    with memtriage.watch(quiet=True) as watch:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
    assert judged(watch).steps == 3
    assert names(judged(watch)) == ["start", *["backward", "step"] * 3, "end"]


@pytest.mark.long
def test_without_an_optimizer_growth_is_seen_from_backward_to_backward() -> None:
    model, _ = model_and_optimizer()
    kept = []
    with memtriage.watch(quiet=True) as watch:
        for _ in range(10):
            model(torch.randn(8, 64)).sum().backward()
            kept.append(torch.zeros(100_000))
    report = judged(watch)
    assert (report.verdict, report.steps) == ("leak", 0)
    finding = report.findings[0]
    assert finding.bytes_per_step is None
    assert finding.bytes_per_microbatch == pytest.approx(400_000, rel=0.01)
    assert "kept" in (finding.holder or "")


@pytest.mark.long
def test_cache_filled_by_the_first_step_is_no_leak() -> None:
    model, optimizer = model_and_optimizer()
    cache: dict[int, Any] = {}
    with memtriage.watch(quiet=True) as watch:
        for _ in range(3):
            for length in range(1, 13):
                mask = cache.setdefault(length, torch.ones(100_000))
                (model(torch.randn(8, 64)).sum() * mask.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(watch)
    assert (report.verdict, report.findings) == ("clean", [])
    limit = report.judged["cpu"].detection_limit
    assert limit is not None and limit.per == "step" and limit.bytes < 12 * 400_000  # as in the first step


# --- how the block ends -------------------------------------------------------------------------------------


def test_an_exception_goes_through_and_is_in_the_report(no_census: None) -> None:
    with pytest.raises(ValueError, match="nan"), memtriage.watch(quiet=True) as watch:
        train(2)
        raise ValueError("the loss is nan")
    assert (judged(watch).verdict, judged(watch).exception) == ("not_judged", "ValueError: the loss is nan")


def test_leaving_by_sys_exit_is_no_exception(no_census: None) -> None:
    with pytest.raises(SystemExit), memtriage.watch(quiet=True) as watch:
        sys.exit(0)
    assert (judged(watch).verdict, judged(watch).exception) == ("not_judged", None)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_does_not_hurt(no_census: None) -> None:
    with pytest.raises(Unprintable), memtriage.watch(quiet=True) as watch:
        raise Unprintable
    assert judged(watch).exception == "Unprintable"


def too_much() -> Any:
    return torch.empty(1 << 60, dtype=torch.uint8)


def test_an_out_of_memory_error_that_is_survived_is_no_death(no_census: None) -> None:
    with memtriage.watch(quiet=True) as watch:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="allocate"):
                too_much()
        train(1)
    assert (judged(watch).verdict, judged(watch).findings) == ("not_judged", [])


def test_dying_of_memory_is_the_verdict() -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(RuntimeError, match="allocate"), memtriage.watch(quiet=True) as watch:
        train(2)
        model(torch.randn(8, 64)) + too_much()
    report = judged(watch)
    assert report.verdict == "out_of_memory"
    assert (report.exception or "").startswith("RuntimeError: ")
    (finding,) = report.findings
    assert (finding.kind, finding.device, finding.bytes, finding.step) == ("out_of_memory", "cpu", 1 << 60, 2)


def test_a_directory_that_cannot_be_written_costs_the_record_alone(
    no_census: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with memtriage.watch("/proc/no/such", quiet=True) as watch:
        train(2)
    report = judged(watch)
    assert (report.verdict, report.steps, report.marks, report.ledger) == ("not_judged", 2, [], {})
    assert capfd.readouterr().err.count("cannot write /proc/no/such") == 1


def test_a_forked_child_that_leaves_the_block_reports_nothing(no_census: None, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = -1
    try:
        with memtriage.watch(quiet=True) as watch:
            child = os.fork()
            memtriage.step()
    finally:
        if child == 0:
            os.write(writing, b"none" if watch.report is None else b"some")
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 4) == b"none"
    os.close(reading)
    os.close(writing)
    assert judged(watch).steps == 1


# --- ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zero_alone_reports(
    no_census: None, rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(session_run, "_RANKS_WAIT_S", 0.0)
    with memtriage.watch("runs") as watch:
        memtriage.step()
    assert len(list(Path("runs").glob(f"*/0/rank-0000{rank}.jsonl"))) == 1
    if rank:
        assert watch.report is None
        assert capfd.readouterr() == ("", "")
    else:
        assert (judged(watch).ranks.seen, judged(watch).ranks.of) == (1, 2)
        assert judged(watch).marks[0].rank == 0


# --- looking ------------------------------------------------------------------------------------------------


def test_a_census_names_a_tensor_and_keeps_nothing() -> None:
    tensor = torch.zeros(12_345)
    storage = tensor.untyped_storage()
    gone, address = weakref.ref(tensor), storage.data_ptr()
    del storage
    census = memtriage.census()
    (record,) = [storage for storage in census.storages if storage.address == address]
    assert (record.device, record.nbytes, record.owner) == ("cpu", 4 * 12_345, "variable")
    assert record.holder == "frame test_a_census_names_a_tensor_and_keeps_nothing(): tensor"
    del tensor
    assert gone() is None
    assert census.objects > 1000 and census.seconds > 0
    assert sum(group.nbytes for group in census.groups) == sum(storage.nbytes for storage in census.storages)


def test_a_ledger_sums_to_what_was_measured() -> None:
    kept = torch.zeros(1 << 20)
    ledgers = memtriage.ledger()
    assert "host" in [ledger.device for ledger in ledgers]
    (host,) = memtriage.ledger("host")
    assert host.device == "host"
    for ledger in [*ledgers, host]:
        assert sum(row.bytes for row in ledger.rows) == ledger.total > 0
    variables = sum(row.bytes for row in host.rows if row.owner == "variable")
    assert variables >= kept.nbytes


def test_a_ledger_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no ledger for device 'cuda:77': .* host"):
        memtriage.ledger("cuda:77")


def test_nothing_is_left_of_a_watched_program() -> None:
    with memtriage.watch(quiet=True):
        model, optimizer = model_and_optimizer()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        gone = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert gone() is None
