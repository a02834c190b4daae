"""`memtriage explain` on files, pipes and playbook entries; what it prints, and how it fails."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import memtriage
from memtriage.cli import app
from memtriage.cli.explain import parse_shapes
from memtriage.playbook.entries import PLAYBOOK
from support.refusals import Refused

TEXT = (
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total "
    "capacity of 79.18 GiB of which 1.08 GiB is free. Of the allocated memory 60.00 GiB is allocated by "
    "PyTorch, and 17.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(f"step 1\n{TEXT}[rank1]: [Rank 1] Watchdog caught collective operation timeout\n")
    return path


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_the_page(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["explain", "--full", str(log)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("FRAGMENTATION: enough memory is free, but in holes that are each too small\n")
    for heading in ("Evidence", "What to do", "Events"):
        assert f"\n{heading}" in out
    assert "1. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in out
    assert "saves up to 17.00 GiB" in out
    assert "-> 2  rank 5: fragmentation" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("arguments", [["-"], []])
def test_json_of_a_pipe(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    piped(monkeypatch, TEXT.encode())
    assert app.main(["explain", *arguments, "--json"]) == 0
    out, err = capfdbinary.readouterr()
    assert err == b""
    report = json.loads(out)
    assert list(report)[:2] == ["schema", "diagnosis"]
    assert (report["schema"], report["diagnosis"], report["confidence"]) == (1, "fragmentation", 0.95)
    assert report["fields"]["requested"] == 2 * 1024**3
    assert set(report["fixes"][0]) == {"playbook", "action", "why", "saves_bytes", "math", "costs"}
    assert "saves_bytes" not in report["fixes"][1], "what is unknown is left out"


def test_the_message_itself_as_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["explain", TEXT]) == 0
    assert capsys.readouterr().out.startswith("FRAGMENTATION")


@pytest.mark.parametrize("name", ["M8", "m8"])
def test_an_entry_of_the_playbook(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["explain", name]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("M8 Expandable segments")
    assert PLAYBOOK["M8"].rungs[0].no_help in out


@pytest.mark.parametrize("name", PLAYBOOK)
def test_every_entry_as_json(name: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert app.main(["explain", name, "--json"]) == 0
    entry = json.loads(capfdbinary.readouterr().out)
    assert (entry["schema"], entry["name"], entry["says"]) == (1, name, PLAYBOOK[name].says)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-file"], "no-such-file: No such file or directory"),
        (["M99"], "no entry M99 in the playbook: it has M1 to M21"),
        (["."], ".: Is a directory"),
        (["-", "--shapes", "batch"], "invalid --shapes 'batch': use NAME=SIZE, such as batch=8"),
        (["-", "--shapes", "batch=eight"], "invalid --shapes 'batch=eight': use NAME=SIZE, such as batch=8"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], reason: str, refused: Refused) -> None:
    assert refused("explain", *arguments) == f"memtriage explain: {reason}"


def test_at_a_terminal_it_does_not_wait_for_input(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert "name a file" in refused("explain")


def test_sizes_in_any_spelling() -> None:
    assert parse_shapes("batch=8,Vocab=151_936,params=7e9,other=1.5b,") == {
        "batch": 8,
        "vocab": 151936,
        "params": 7_000_000_000,
        "other": 1_500_000_000,
    }
    assert parse_shapes("") == {}


def test_from_python() -> None:
    diagnosis = memtriage.explain(TEXT, {"batch": 8, "heads": 16, "seq": 2048})
    assert diagnosis.diagnosis == "fragmentation"
    assert any("batch x heads x seq x seq" in line for line in diagnosis.evidence)


def test_neither_torch_nor_numpy_is_needed() -> None:
    code = (
        "import sys; from memtriage.cli import app; app.main(['explain', '-']);"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=TEXT, capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stderr
