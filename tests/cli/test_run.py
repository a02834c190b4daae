"""`memtriage run` end to end: real scripts in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtriage.model.report import RunReport
from memtriage.model.units import size
from support.context_programs import KEEPS_IN_CONTEXT
from support.signals import AS_FROM_A_TERMINAL

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Run:
    """What came of one watched script. `report` is None where no JSON was written."""

    folder: Path
    status: int
    report: dict[str, Any] | None
    stdout: str
    stderr: str

    @property
    def judged(self) -> dict[str, Any]:
        assert self.report is not None, self.stderr[-3000:]
        return self.report

    def records(self) -> list[dict[str, Any]]:
        """All lines of the only record."""
        (path,) = self.folder.glob("runs/*/*/rank-*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder: Path, source: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def command(folder: Path, *words: str) -> list[str]:
    own = ["-o", str(folder / "runs"), "--json", str(folder / "report.json")]
    return [sys.executable, "-m", "memtriage", "run", *own, *words]


def outcome(folder: Path, status: int, stdout: str, stderr: str) -> Run:
    path = folder / "report.json"
    report = json.loads(path.read_text()) if path.exists() else None
    return Run(folder, status, report, stdout, stderr)


def run(folder: Path, source: str, *args: str) -> Run:
    script = write(folder, source)
    done = subprocess.run(
        command(folder, str(script), *args), cwd=folder, env=ENV, capture_output=True, text=True, timeout=120
    )
    return outcome(folder, done.returncode, done.stdout, done.stderr)


def report_again(folder: Path) -> dict[str, Any]:
    """What `memtriage report DIR --json` says."""
    done = subprocess.run(
        [sys.executable, "-m", "memtriage", "report", str(folder / "runs"), "--json", "--as-recorded"],
        env=ENV, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def assert_report(report: dict[str, Any]) -> None:
    """The report has exactly the keys of schema 1, each of its type; every ledger has rows."""
    known = msgspec.convert(report, RunReport)
    assert msgspec.json.decode(msgspec.json.encode(known)) == report
    assert report["schema"] == 1
    assert all(report["ledger"].values())


# --- a healthy script ---------------------------------------------------------------------------------------

CLEAN = """
    import memtriage
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Preprocessed(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            w = torch.ones(4, requires_grad=True)
            optimizer = torch.optim.SGD([w], lr=0.1)
            w.sum().backward()
            optimizer.step()
            memtriage.mark("in a worker")
            memtriage.step()
            return w.detach() * index

    def main():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(60):
            x = torch.randn(32, 64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 9:
                memtriage.mark("after refit")
        loader = DataLoader(Preprocessed(), batch_size=2, num_workers=2)
        print("rows", sum(len(batch) for batch in loader))

    main()
"""


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("clean"), CLEAN)


def test_a_healthy_script_is_clean(clean: Run) -> None:
    assert (clean.status, clean.stdout) == (0, "rows 8\n")
    assert clean.stderr.count("taking a census") == 1
    kinds = [line["t"] for line in clean.records()]
    assert kinds.count("start") == kinds.count("end") == 1  # workers of the loader write none
    report = clean.judged
    assert_report(report)
    assert report["verdict"] == "clean"
    assert report["findings"] == []
    assert report["exception"] is None
    assert report["steps"] == 60
    assert report["ranks"] == {"seen": 1, "of": 1}
    assert {"host"} <= set(report["ledger"]) <= {"host", "job"}  # its workers live for a moment
    said = report["judged"]["cpu"]
    assert (said["scale"], said["points"], said["reason"]) == ("step", 60, None)
    limit = said["detection_limit"]
    assert limit["per"] == "step" and limit["bytes"] >= 1024
    words = f"CLEAN: no growth above {size(limit['bytes'])} per step on cpu in 60 steps"
    assert clean.stderr.count("CLEAN") == clean.stderr.count(words) == 1
    assert report_again(clean.folder) == report


def test_marks_are_made_by_backward_step_and_name(clean: Run) -> None:
    marks = [(mark["name"], mark["step"], mark["microbatch"]) for mark in clean.judged["marks"]]
    steps = [
        each
        for step in range(1, 61)
        for each in [("backward", step - 1, 1), ("step", step, 1), ("after refit", 10, 1)]
        if each[0] != "after refit" or step == 10
    ]
    assert [mark for mark in marks if mark[0] != "time"] == [("start", 0, 0), *steps, ("end", 60, 1)]
    first = clean.judged["marks"][0]
    assert first["device"] == "cpu" and first["rank"] is None and first["host_rss"] > 0


def test_the_host_s_ledger_is_nearly_closed(clean: Run) -> None:
    rows = clean.judged["ledger"]["host"]
    unexplained = sum(abs(row["bytes"]) for row in rows if row["row"] == "unexplained")
    assert unexplained <= 0.03 * sum(row["bytes"] for row in rows)
    tensors = {row["owner"]: row["bytes"] for row in rows if row["row"] == "CPU tensors"}
    parameters = 4 * (64 * 128 + 128 + 128 + 1)
    assert tensors["parameter"] == tensors["gradient"] == parameters
    assert tensors["optimizer state"] == pytest.approx(2 * parameters, abs=64)  # and four step counters


# --- a leaking script, watched and unwatched ----------------------------------------------------------------

LEAK = (
    """
    import sys
    import torch
    from torch import nn
    from torch.autograd import profiler
    from torch.utils.checkpoint import checkpoint

    calls = 0
"""
    + KEEPS_IN_CONTEXT
    + """
    def block(layer, x):
        global calls
        calls += 1
        return torch.relu(layer(x))

    def main():
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        optimizer = torch.optim.AdamW(layers.parameters())
        losses = {"lm": []}
        for step in range(24):
            x = inputs = torch.randn(256 + 8 * (step % 3), 64)
            for layer in layers:
                x = checkpoint(block, layer, x, use_reentrant=False)
            loss = Wrap.apply(inputs, x.square().mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses["lm"].append(loss)

    def memory(events):
        live = peak = 0
        changes = [event.nbytes() for event in events if event.name() == "[memory]"]
        for change in changes:
            live += change
            peak = max(peak, live)
        return len(changes), peak

    with profiler.profile(profile_memory=True) as profile:
        main()
    print("calls", calls)
    print("allocations and frees, peak of live bytes:", *memory(profile.kineto_results.events()))
"""
)


@pytest.fixture(scope="module")
def leak(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("leak"), LEAK)


def test_a_leak_is_named_with_all_that_a_finding_has(leak: Run) -> None:
    report = leak.judged
    assert leak.status == 0
    assert_report(report)
    assert report["verdict"] == "leak"
    assert report["steps"] == 24
    finding = report["findings"][0]
    assert finding["kind"] == "leak"
    assert finding["device"] == "cpu"
    assert finding["rank"] is None
    assert finding["holder"] == "frame main(): losses['lm'][*] -> grad_fn WrapBackward -> ctx.context[1]"
    assert finding["allocated_at"] == "train.py:13 in forward"
    assert "ctx.context" in finding["mechanism"] and "detach" in finding["fix"]
    assert finding["playbook"] == "M21"
    kept = [2 * 4 * 64 * (256 + 8 * (step % 3)) for step in range(24)]
    assert finding["bytes_per_step"] == finding["bytes_per_microbatch"]
    assert min(kept) <= finding["bytes_per_step"] <= max(kept) + 8192  # with the graph's nodes
    assert finding["bytes"] <= sum(kept) + 24 * 8192
    assert 0 < finding["step"] <= 24
    assert any("full at step" in line for line in finding["evidence"])
    assert "LEAK" in leak.stderr and "ctx.context" in leak.stderr


def test_watching_neither_allocates_nor_keeps_tensors(leak: Run) -> None:
    plain = subprocess.run(
        [sys.executable, str(leak.folder / "train.py")],
        cwd=leak.folder, env=ENV, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "calls 144\n" in plain.stdout
    assert leak.stdout == plain.stdout


def test_the_record_gives_the_same_report_again(leak: Run) -> None:
    assert report_again(leak.folder) == leak.judged


# --- how a script ends --------------------------------------------------------------------------------------


HOST_LEAK = """
    import os, signal, sys
    import memtriage

    kept = []

    def train(steps):
        for step in range(steps):
            kept.append(bytearray(200_000))
            memtriage.step()

    assert "torch" not in sys.modules
    train({steps})
    memtriage.mark("before the end")
    print("ready", flush=True)
    {end}
"""


def host_leak(end: str, steps: int = 40) -> str:
    return textwrap.dedent(HOST_LEAK).format(end=end, steps=steps)


@pytest.mark.parametrize(
    ("end", "status", "exception"),
    [
        ("pass", 0, None),
        ("sys.exit(3)", 3, None),
        ("sys.exit('no more data')", 1, None),
        ("raise ValueError('the loss is nan')", 1, "ValueError: the loss is nan"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_script_ends_as_it_would_and_has_its_verdict(
    tmp_path: Path, end: str, status: int, exception: str | None
) -> None:
    done = run(tmp_path, host_leak(end))
    assert done.status == status
    assert done.stdout == "ready\n"
    assert done.stderr.count("no more data") == (1 if "no more data" in end else 0)
    report = done.judged
    assert_report(report)
    assert (report["verdict"], report["exception"], report["steps"]) == ("leak", exception, 40)
    assert [mark["name"] for mark in report["marks"]][-2:] == ["before the end", "end"]
    finding = report["findings"][0]
    assert (finding["kind"], finding["device"], finding["holder"]) == ("leak", "host", "train.kept[*]")
    assert finding["bytes_per_step"] == pytest.approx(200_000, rel=0.01)
    assert finding["allocated_at"] == "train.py:9 in train"


def test_sites_are_named_from_the_folder_of_the_script(tmp_path: Path) -> None:
    write(tmp_path, "def batch():\n    return bytearray(200_000)\n", "parts/data.py")
    source = "from parts.data import batch\n" + host_leak("pass").replace("bytearray(200_000)", "batch()")
    (finding,) = run(tmp_path, source).judged["findings"]
    assert finding["allocated_at"] == "parts/data.py:2 in batch"


def interrupted(folder: Path, source: str, signum: int) -> Run:
    """A script that waits for its input behind the line `ready` gets a signal there."""
    script = write(folder, source)
    with subprocess.Popen(
        [*AS_FROM_A_TERMINAL, *command(folder, str(script))], cwd=folder, env=ENV, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=60)
    return outcome(folder, process.returncode, stdout, stderr)


@pytest.mark.parametrize(
    ("signum", "exception"),
    [
        (signal.SIGTERM, "terminated by SIGTERM"),
        (signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_signal_ends_the_script_and_the_report_comes_first(
    tmp_path: Path, signum: int, exception: str
) -> None:
    done = interrupted(tmp_path, host_leak("sys.stdin.readline(); print('not reached')"), signum)
    assert done.status == -signum
    assert done.stdout == ""
    report = done.judged
    assert_report(report)
    assert (report["verdict"], report["exception"], report["steps"]) == ("leak", exception, 40)
    assert report["findings"][0]["holder"] == "train.kept[*]"
    assert done.stderr.count("LEAK") == 1
    assert report_again(tmp_path) == report


@pytest.mark.parametrize(("steps", "kinds"), [(6, []), (40, ["leak"])])
def test_after_sigkill_the_record_still_speaks(tmp_path: Path, steps: int, kinds: list[str]) -> None:
    done = run(tmp_path, host_leak("os.kill(os.getpid(), signal.SIGKILL)", steps))
    assert (done.status, done.report) == (-signal.SIGKILL, None)
    report = report_again(tmp_path)
    assert_report(report)
    assert (report["verdict"], report["steps"], report["exception"]) == ("killed", steps, None)
    assert [mark["step"] for mark in report["marks"] if mark["name"] == "step"] == list(range(1, steps + 1))
    assert [finding["kind"] for finding in report["findings"]] == kinds


def test_a_script_that_leaves_by_os_exit_keeps_its_status(tmp_path: Path) -> None:
    done = run(tmp_path, host_leak("os._exit(7)", 6))
    assert done.status == 7
    assert report_again(tmp_path)["steps"] == 6


FAILED = "the script failed before its first step"
TRAINING = """
    import torch
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range({steps}):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    {end}
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "print('hello')",
            "torch was not imported: no step was seen; 12 steps, or more time without any, are needed",
        ),
        ("import there_is_no_such_module", FAILED),
        ("def broken(:", FAILED),
        ("import torch; open('there is no such file')", FAILED),
        ("import argparse; argparse.ArgumentParser().error('no data')", FAILED),
        (TRAINING.format(steps=3, end=""), "3 steps are too few, 12 are needed"),
        (TRAINING.format(steps=3, end="raise ValueError('nan')"), "the script failed after 3 steps: "),
    ],
)
def test_a_script_that_is_too_short_is_not_judged(source: str, why: str, tmp_path: Path) -> None:
    done = run(tmp_path, source)
    report = done.judged
    assert_report(report)
    assert (report["verdict"], report["findings"]) == ("not_judged", [])
    assert report["judged"]["cpu"]["detection_limit"] is None
    assert report["judged"]["cpu"]["reason"].startswith(why)
    assert f"NOT JUDGED: {why}" in done.stderr
    assert "CLEAN" not in done.stderr
    assert ("in use" in done.stderr) == (why != FAILED)
    if why == FAILED:  # after what the script printed, one line
        script = [sys.executable, str(done.folder / "train.py")]
        plain = subprocess.run(script, capture_output=True, text=True)
        assert done.stderr == f"{plain.stderr}NOT JUDGED: {why}\n"
    assert report_again(tmp_path) == report


LOADS = """
    import time
    import torch

    kept, began = [], time.perf_counter()
    while (elapsed := time.perf_counter() - began) < 2.5:
        if len(kept) < 200 * elapsed:
            kept.append(torch.ones(64, 256))  # 64 KiB, 200 times per second
"""


def test_nothing_is_looked_at_before_the_first_step(tmp_path: Path) -> None:
    trains = """
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight])
    for _ in range(20):
        weight.sum().backward()
        optimizer.step()
    """
    done = run(tmp_path, LOADS + trains)
    lines = [(line["t"], line.get("name"), line.get("step")) for line in done.records()]
    first = next(at for at, (_, name, _) in enumerate(lines) if name == "backward")
    before = {kind for kind, *_ in lines[:first]}
    assert ("mark", "time", 0) in lines[:first]  # counters were read
    assert before <= {"start", "mark", "host", "readings"}  # no census, no ledger, no suspicion
    assert done.judged["verdict"] == "clean", done.stderr


def test_a_script_that_makes_no_step_is_judged_at_its_end(tmp_path: Path) -> None:
    done = run(tmp_path, LOADS)
    kinds = [(line["t"], line.get("name")) for line in done.records() if line["t"] != "host"]
    assert kinds.index(("ledger", None)) > max(
        at for at, kind in enumerate(kinds) if kind == ("mark", "time")
    )
    assert done.stderr.count("taking a census") == 1
    (finding,) = done.judged["findings"]
    assert (finding["certainty"], finding["holder"]) == ("suspected", "train.kept[*]")
    assert finding["bytes_per_second"] == pytest.approx(200 << 16, rel=0.2)
    assert done.judged["verdict"] == "not_judged"


def test_gradients_without_a_backward_are_judged_while_they_are_computed(tmp_path: Path) -> None:
    source = """
        import torch
        image, weight = torch.randn(128, 256), torch.randn(256, 256, requires_grad=True)
        maps = []
        for _ in range(200):
            score = (image @ weight).relu().sum()
            maps.append(torch.autograd.grad(score, weight)[0])
    """
    judged = run(tmp_path, source).judged
    (finding,) = judged["findings"]
    assert (judged["verdict"], finding["certainty"]) == ("leak", "proven")
    assert "maps" in finding["holder"] and finding["allocated_at"] is not None
    assert finding["bytes_per_microbatch"] == pytest.approx(4 * 256 * 256, rel=0.1)


def test_a_module_of_a_package_is_run(tmp_path: Path) -> None:
    write(tmp_path, "", "pkg/__init__.py")
    write(tmp_path, "import sys, memtriage; memtriage.step(); print(__name__, sys.argv[1:])", "pkg/train.py")
    done = subprocess.run(
        command(tmp_path, "-m", "pkg.train", "--lr", "1"),
        cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    made = outcome(tmp_path, done.returncode, done.stdout, done.stderr)
    assert made.stdout == "__main__ ['--lr', '1']\n"
    assert (made.status, made.judged["verdict"], made.judged["steps"]) == (0, "not_judged", 1)


def test_unwritable_directory_costs_only_the_record(tmp_path: Path) -> None:
    script = write(tmp_path, host_leak("sys.exit(3)"))
    result = tmp_path / "report.json"
    done = subprocess.run(
        [*command(tmp_path)[:4], "-o", "/proc/no/such", "--json", str(result), str(script)],
        cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "ready\n")
    assert done.stderr.count("memtriage: cannot write /proc/no/such") == 1
    assert "Traceback" not in done.stderr
    report = json.loads(result.read_text())
    assert_report(report)
    assert (report["verdict"], report["steps"]) == ("leak", 40)
    assert report["findings"][0]["holder"] == "train.kept[*]"


# --- other processes ----------------------------------------------------------------------------------------

CHILDREN = """
    import multiprocessing
    import os
    import sys
    import memtriage
    from memtriage.process import active

    def work(name):
        memtriage.mark(name)
        for _ in range(3):
            memtriage.step()
        session = active.session
        return name, os.getpid() != PARENT, session is not None and session.running

    PARENT = int(os.environ.setdefault("PARENT", str(os.getpid())))

    if __name__ == "__main__":
        memtriage.step()
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(pool.apply(work, (method,)), flush=True)
        memtriage.step()
        child = os.fork()
        memtriage.mark("both")
        if child:
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            sys.exit(5)
"""


def test_children_of_the_script_are_not_watched(tmp_path: Path) -> None:
    done = run(tmp_path, CHILDREN)
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines() == ["('fork', True, False)", "('spawn', True, False)", "child 5"]
    assert done.stderr.count("NOT JUDGED") == 1
    kinds = [line["t"] for line in done.records()]
    assert kinds.count("start") == kinds.count("end") == 1
    names = [mark["name"] for mark in done.judged["marks"]]
    assert names == ["start", "step", "step", "both", "end"]


# --- memory runs out ----------------------------------------------------------------------------------------

OUT_OF_MEMORY = """
    import resource
    import torch
    from torch import nn

    MIB = 1 << 20
    history = []

    def allow(headroom):
        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (in_use + headroom * MIB, hard))

    def evaluate(model, x):
        with torch.no_grad():
            for layer in model:
                x = layer(x)
            return x.repeat(64, 64)

    def main():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            allow(4096)
            torch.empty(8192 * MIB)
        except RuntimeError:
            print("went on")
        for step in range(16):
            x = torch.randn(ROWS, WIDTH)
            loss = model(x).sum()
            BEFORE_BACKWARD
            loss.backward()
            BEFORE_STEP
            optimizer.step()
            optimizer.zero_grad()
            AFTER_STEP

    main()
"""


@dataclass(frozen=True)
class Death:
    """When the limit is set, and what follows: playbook entry, phase, completed steps."""

    entry: str
    phase: str
    steps: int
    width: int = 512
    rows: str = "64"
    before_backward: str = "pass"
    before_step: str = "pass"
    after_step: str = "pass"


# What fails asks for several times the headroom, and what goes before it for a fraction of it.
DEATHS = [
    Death("M14", "backward", 0, width=4096, before_backward="allow(48)"),
    Death("M17", "optimizer", 0, width=4096, before_step="allow(48)"),
    Death(
        "M15", "evaluation", 14, rows="1024",
        after_step="history.append(x.clone()); "
        "step == 13 and (allow(96), evaluate(model, x))",
    ),
    Death("M16", "forward", 5, rows="65536 if step == 5 else 64", after_step="step == 4 and allow(400)"),
]  # fmt: skip


@pytest.fixture(scope="module", params=DEATHS, ids=[death.entry for death in DEATHS])
def dead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Death, Run]:
    death: Death = request.param
    source = textwrap.dedent(OUT_OF_MEMORY)
    for word in ("width", "rows", "before_backward", "before_step", "after_step"):
        source = source.replace(word.upper(), str(getattr(death, word)))
    return death, run(tmp_path_factory.mktemp(death.entry), source)


def test_when_memory_ran_out(dead: tuple[Death, Run]) -> None:
    death, done = dead
    report = done.judged
    assert_report(report)
    assert (done.status, report["verdict"], done.stdout) == (1, "out_of_memory", "went on\n")
    assert report["steps"] == death.steps
    assert report["exception"].startswith("RuntimeError: ")
    assert "can't allocate memory" in report["exception"]
    (finding,) = [each for each in report["findings"] if each["kind"] == "out_of_memory"]
    assert (finding["playbook"], finding["phase"], finding["step"]) == (death.entry, death.phase, death.steps)
    assert finding["device"] == "cpu"
    assert finding["bytes"] >= 64 << 20
    assert finding["fix"] and finding["mechanism"]
    assert any("host allocation failed" in line for line in finding["evidence"])
    assert "OUT OF MEMORY" in done.stderr.upper()
    others = [each["holder"] for each in report["findings"] if each["kind"] == "leak"]
    assert others == (["train.history[*]"] if death.entry == "M15" else [])


def test_a_survived_error_is_no_death(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import memtriage
        for step in range(12):
            memtriage.step()
            try:
                bytearray(1 << 62)
            except MemoryError:
                continue
        """,
    )
    report = done.judged
    assert (done.status, report["verdict"], report["findings"]) == (0, "clean", [])
    assert report["exception"] is None
