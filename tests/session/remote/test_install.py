"""The hook that arms the listener in every job of an environment, and that breaks none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from memtriage.session.remote import install as hook
from memtriage.session.remote.ask import ask, listening
from memtriage.session.remote.listen import Listener
from memtriage.session.remote.socket_path import socket_of
from memtriage.session.remote.take import take_answer

_JOB = """
import site, sys
site.addsitedir(sys.argv[1])
GONE
import torch
kept = [torch.zeros(1000)]
finders = [type(finder).__name__ for finder in sys.meta_path if not isinstance(finder, type)]
print("_ArmingFinder" in finders, "exec_module" in vars(torch.__spec__.loader), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    hook.install(tmp_path)
    yield tmp_path


def _start(folder: Path, gone: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _JOB.replace("GONE", gone), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_job_listens_once_it_imports_torch(folder: Path) -> None:
    job = _start(folder)
    assert job.stdout is not None and job.stdout.readline() == "False False\n"
    assert listening(job.pid) == [job.pid]
    path = socket_of(job.pid)
    assert path is not None and path.exists()
    answer = ask(job.pid, 60)
    assert (answer.step, answer.doing) == (None, None)
    assert any(row.holder == "__main__.kept[*]" and row.bytes == 4000 for row in answer.holders)
    output, errors = job.communicate("\n")
    assert (job.returncode, output, errors) == (0, "", "")
    assert not path.exists()


@pytest.mark.parametrize("gone", ["sys.modules['memtriage'] = None", "sys.modules['msgspec'] = None"])
def test_a_job_goes_on_where_memtriage_is_gone(folder: Path, gone: str) -> None:
    job = _start(folder, gone)
    output, errors = job.communicate("\n")
    assert (job.returncode, output, errors) == (0, "False False\n", "")


@pytest.mark.parametrize("text", [None, "raise ImportError", "this is no Python", "import no_such_module"])
def test_python_starts_whatever_has_become_of_the_hook(folder: Path, text: str | None) -> None:
    module, _ = hook.files(folder)
    module.unlink()
    if text is not None:
        module.write_text(text)
    started = subprocess.run(
        [sys.executable, "-c", f"import site; site.addsitedir({str(folder)!r}); print('started')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (started.stdout, started.stderr) == ("started\n", "")


def test_a_program_without_torch_loads_nothing_of_memtriage(folder: Path) -> None:
    program = (
        f"import site, sys; site.addsitedir({str(folder)!r}); import json\n"
        f"print(sorted(name for name in sys.modules if 'memtriage' in name))"
    )
    started = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert started.stdout == f"['{hook.MODULE}']\n"


def test_whoever_listens_next_stops_who_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(within_s: float, follow: bool) -> object:
        return take_answer()

    first, second = Listener(answer), Listener(answer)  # type: ignore[arg-type]
    first.start()
    second.start()
    try:
        assert second.path is not None and second.path.exists()
        assert first.path == second.path
    finally:
        second.stop()
        first.stop()
    assert second.path is not None and not second.path.exists()
