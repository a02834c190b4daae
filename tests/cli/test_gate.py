"""`memtriage gate` as a user, or a pull request, types it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from memtriage.cli.app import main
from support.refusals import Refused

PROGRAM = """
import torch

WIDTH = 256

def build(device):
    model = torch.nn.Linear(256, WIDTH, device=device)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.ones(1024, 256, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "train.py").write_text(PROGRAM)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "base"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *command], cwd=folder, check=True)
    return folder


Gate = Callable[..., tuple[int, dict[str, int]]]


@pytest.fixture
def gate(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gate:
    """Runs the gate on the program with another width; returns its status and its JSON."""
    monkeypatch.chdir(repository)

    def run(width: int, *options: str) -> tuple[int, dict[str, int]]:
        (repository / "train.py").write_text(PROGRAM.replace("WIDTH = 256", f"WIDTH = {width}"))
        status = main(["gate", "--base", "HEAD", "--json", *options, "--", "train.py:build"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_higher_peak_is_above_the_limit_and_named(gate: Gate, tmp_path: Path) -> None:
    comment, checks = tmp_path / "comment.md", tmp_path / "junit.xml"
    status, found = gate(512, "--markdown", str(comment), "--junit", str(checks))
    assert (status, found["exceeded"]) == (3, True)
    assert found["peak"] == found["after"] > found["limit"] == int(found["before"] * 1.01)
    assert found["difference"] == found["after"] - found["before"]
    assert "| difference | before | after |" in comment.read_text()
    (case,) = ElementTree.fromstring(checks.read_text())
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("ABOVE the limit")


def test_the_same_program_is_within_and_so_is_what_is_tolerated(gate: Gate) -> None:
    status, found = gate(256)
    assert (status, found["exceeded"], found["difference"], found["rows"]) == (0, False, 0, [])
    status, found = gate(512, "--tolerance", "200%")
    assert (status, found["exceeded"]) == (0, False)
    assert found["difference"] > 0


def test_the_budget_is_for_all_device_memory(gate: Gate) -> None:
    status, found = gate(256, "--budget", "100MiB")
    outside = found["figures"]["outside the allocator"]["after"]  # type: ignore[index]
    reserved = found["figures"]["reserved"]["after"]  # type: ignore[index]
    assert (status, found["limit"]) == (3, 100 << 20)
    assert found["peak"] == reserved + outside
    status, found = gate(256, "--budget", "80GiB")
    assert (status, found["exceeded"]) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base", "HEAD"], "Missing argument"),
        (["train.py:build"], "Missing option"),
        (["--base", "nothing", "--", "train.py:build"], "--base nothing: no such commit"),
        (["--base", "HEAD", "--tolerance", "much", "--", "train.py"], "invalid --tolerance 'much'"),
        (["--base", "HEAD", "--budget", "24", "--", "train.py"], "did you mean 24GiB?"),
        (["--base", "HEAD", "--", "--steps", "0", "train.py:build"], "steps=0"),
        (["--base", "HEAD", "--markdown", "/no/c.md", "--", "train.py:build"], "/no/c.md: No such"),
        (["--base", "HEAD", "--", "none.py:build"], "HEAD could not be predicted: no such file"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, repository: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(repository)
    assert said in refused("gate", *arguments)
