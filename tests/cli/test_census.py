"""`memtriage census` against a real job that was started with `memtriage run --listen`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memtriage.cli import app
from memtriage.model.asked import Answer
from support.refusals import Refused

pytest.importorskip("torch")

_JOB = """
import faulthandler, os, sys
import torch

faulthandler.enable(open("stacks", "w"))
stop = sys.argv[1]

def train():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = [torch.zeros(30_011) for _ in range(3)]
    step = 0
    while not os.path.exists(stop):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 5:
            print("ready", file=sys.stderr, flush=True)

train()
"""


@dataclass
class Job:
    """A watched job, in a process below another one, as below a launcher."""

    launcher: subprocess.Popen[str]
    pid: int
    folder: Path
    said: str

    def stacks(self) -> str:
        """Abort the job; return the stack of each of its threads."""
        os.kill(self.pid, signal.SIGABRT)
        self.launcher.wait()
        return (self.folder / "stacks").read_text()

    def stop(self) -> str:
        """Ends the script; returns what the job said on stderr."""
        (self.folder / "stop").touch()
        assert self.launcher.stderr is not None
        said = self.said + self.launcher.stderr.read()
        self.launcher.wait()
        return said


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("job")
    script = folder / "train.py"
    script.write_text(_JOB)
    os.mkfifo(folder / "ready")
    command = [
        sys.executable,
        *["-m", "memtriage", "run", "--listen", "-o", "record", "train.py", "stop", "ready"],
    ]
    launcher = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))", *command],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)},
    )
    assert launcher.stderr is not None
    said = []
    while said[-1:] != ["ready\n"]:
        said.append(launcher.stderr.readline())
        assert said[-1], "".join(said)
    (socket,) = (folder / "memtriage").iterdir()
    pid = int(socket.stem.rpartition("-")[2])
    yield Job(launcher, pid, folder, "".join(said))
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    launcher.wait()
    launcher.stderr.close()


def asked(capsysbinary: pytest.CaptureFixture[bytes], *arguments: str) -> tuple[int, bytes, str]:
    status = app.main(["census", *arguments])
    out, err = capsysbinary.readouterr()
    return status, out, err.decode()


def answer(capsysbinary: pytest.CaptureFixture[bytes], job: Job, pid: int | None = None) -> dict[str, Any]:
    status, out, err = asked(capsysbinary, "--pid", str(pid or job.pid), "--json")
    assert (status, err) == (0, ""), job.stacks()
    said = json.loads(out)
    assert (said["schema"], said["failed"], len(said["answers"])) == (1, [], 1)
    found: dict[str, Any] = said["answers"][0]
    return found


def test_who_holds_what_now(job: Job, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    found = answer(capsysbinary, job)
    assert (found["pid"], found["rank"]) == (job.pid, None)
    assert found["step"] >= 5 and found["doing"] in ("forward", "backward", "optimizer")
    kept = next(row for row in found["holders"] if row["holder"] == "frame train(): kept[*]")
    assert (kept["count"], kept["bytes"], kept["device"]) == (3, 3 * 4 * 30_011, "cpu")
    owners = {row["owner"] for row in found["ledger"]["host"]}
    assert {"parameter", "optimizer state"} <= owners
    assert all("memtriage" not in (row["holder"] or "") for row in found["holders"])
    assert found["paused_s"] > 0 and found["objects"] > 1000


def test_asking_keeps_nothing_and_stops_nothing(job: Job, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    first = answer(capsysbinary, job)
    second = answer(capsysbinary, job)
    assert second["step"] > first["step"]
    assert job.launcher.poll() is None

    def lasting(found: dict[str, Any]) -> dict[str, int]:
        """What there is at every instant; the rest, and some names, depend on what runs just then."""
        kept = next(row for row in found["holders"] if row["holder"] == "frame train(): kept[*]")
        by_owner = {row["owner"]: row["bytes"] for row in found["ledger"]["host"] if row["owner"]}
        owners = ("parameter", "optimizer state")
        return {"kept": kept["bytes"]} | {owner: by_owner[owner] for owner in owners}

    assert lasting(first) == lasting(second)


def test_a_launcher_is_asked_for_its_ranks(job: Job, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert answer(capsysbinary, job, job.launcher.pid)["pid"] == job.pid


def test_as_text(job: Job, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    status, out, err = asked(capsysbinary, "--pid", str(job.pid), "--rows", "2")
    text = out.decode()
    assert (status, err) == (0, "")
    assert text.startswith("CENSUS: process ")
    assert "frame train(): kept[*] · variable · 3 storages" in text
    held = text[text.index("kept alive on cpu") :].splitlines()
    assert len(held) == 4 and held[3].endswith("of others")


def test_a_stopped_job_does_not_answer_in_time(job: Job, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    os.kill(job.pid, signal.SIGSTOP)
    try:
        status, out, err = asked(capsysbinary, "--pid", str(job.pid), "--timeout", "0.1")
    finally:
        os.kill(job.pid, signal.SIGCONT)
    assert (status, out) == (2, b"")
    assert err == (
        f"memtriage census: process {job.pid} did not answer within 100 ms: it is stopped, or in code that "
        "keeps the interpreter\n"
    )
    assert answer(capsysbinary, job)["step"] > 0


def test_when_the_job_has_ended_its_socket_is_gone(
    job: Job, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    said = job.stop()
    assert job.launcher.returncode == 0
    assert f"memtriage: listening: `memtriage census --pid {job.pid}`" in said
    assert not (job.folder / "memtriage").exists()
    status, _, err = asked(capsysbinary, "--pid", str(job.pid))
    assert (status, err) == (2, f"memtriage census: there is no process {job.pid}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pid", "4194305"], "there is no process 4194305"),
        (["--pid", "-3"], "there is no process -3"),
        (["--pid", "1", "--timeout", "0"], "invalid --timeout 0.0: expected more than 0 seconds"),
        (["--pid", "1", "--rows", "0"], "invalid --rows 0: expected at least 1"),
        ([], "Missing option '--pid'"),
        *(
            (
                ["--pid", "1", f"--pause={pause}"],
                f"invalid --pause={pause}: use 50ms, or another time up to 60 s",
            )
            for pause in ("50", "0ms", "61s", "x")
        ),
    ],
)
def test_refused_in_one_line(refused: Refused, arguments: list[str], said: str) -> None:
    assert said in refused("census", *arguments)


def test_a_process_without_torch_is_refused(refused: Refused) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as plain:
        assert plain.stdout is not None
        plain.stdout.readline()
        assert f"process {plain.pid} has not loaded torch" in refused("census", "--pid", str(plain.pid))
        plain.kill()


@pytest.mark.parametrize(("option", "pause_s"), [("--pause", 0.05), ("--pause=500ms", 0.5), ("--json", 0.0)])
def test_an_incomplete_census_has_a_status_of_its_own(
    option: str, pause_s: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def read(pid: int, timeout_s: float, *, pause_s: float) -> Answer:
        asked.append(pause_s)
        return Answer(pid=pid, incomplete=missing)

    asked: list[float] = []
    monkeypatch.setattr("memtriage.outside.answer.read_answer", read)
    # The job of this file's other tests is below this process, and listens while it lives.
    monkeypatch.setattr("memtriage.session.remote.ask.listening", lambda pid: [])
    for missing, status in ((["8 gradients changed while they were read"], 4), ([], 0)):
        assert app.main(["census", "--pid", str(os.getpid()), option]) == status
        assert ("8 gradients changed" in capfd.readouterr().out) == bool(missing)
    assert asked == [pause_s, pause_s]
