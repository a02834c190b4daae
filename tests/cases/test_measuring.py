"""What the cases' measurements share: jobs in processes, their limits, and why one failed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

CASES = Path(__file__).parents[2] / "cases"
WRITES = "import json, sys; json.dump({'n': int(sys.argv[1])}, open(sys.argv[-1], 'w'))\n"


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(CASES))
    yield importlib.import_module("measuring")
    sys.modules.pop("measuring", None)


def test_jobs_bring_their_figures_and_what_failed_says_why(measuring: ModuleType, tmp_path: Path) -> None:
    texts = {
        "good.py": WRITES,
        "bad.py": "raise ValueError('no such thing')\n",
        "slow.py": "import time; time.sleep(60)\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    jobs = [measuring.Job(name, tmp_path / name, ("5",), watched=False) for name in texts]
    outcomes = {
        job.name: outcome for job, outcome in measuring.run_all(jobs, at_a_time=3, limit_s=8, within_s=60)
    }
    assert outcomes["good.py"].figures == {"n": 5} and outcomes["good.py"].report is None
    assert outcomes["bad.py"].startswith("RuntimeError: exit status 1: ")
    assert "ValueError: no such thing" in outcomes["bad.py"]
    assert outcomes["slow.py"] == "TimeoutError: not done after 8 s"


def test_what_has_no_time_left_does_not_begin(measuring: ModuleType, tmp_path: Path) -> None:
    job = measuring.Job("late", tmp_path / "nothing.py", watched=False)
    ((_, outcome),) = measuring.run_all([job], at_a_time=1, limit_s=60, within_s=1)
    assert outcome == "not begun within 1 s"


def test_ranks_and_the_watch_are_in_the_command(measuring: ModuleType, tmp_path: Path) -> None:
    job = measuring.Job("two", Path("train.py"), ("--x",), ranks=2, per_microbatch=True)
    words = " ".join(job.command(tmp_path)[1:])
    assert words.startswith("-m torch.distributed.run --nproc-per-node=2 --standalone -m memtriage run -o ")
    assert words.endswith(f"--per-microbatch train.py --x --out {tmp_path}/figures.json")


def test_the_scripts_own_traceback_is_told_before_the_launchers(measuring: ModuleType) -> None:
    own = "Traceback (most recent call last):\n  File \"train.py\", line 3, in main\nKeyError: 'x'"
    launcher = (
        'Traceback (most recent call last):\n  File "torch/distributed/run.py", line 9\nChildFailedError'
    )
    outcome = measuring.Outcome(None, None, f"before\n{own}\n{launcher}", 1.0)
    assert measuring.why(outcome).startswith(own)
    lines = ["Traceback (most recent call last):", "  File x", "OSError: y"]
    ranked = "\n".join([*(f"[rank1]: {line}" for line in lines), *["more"] * 5])
    shown = measuring.why(measuring.Outcome(None, None, ranked, 1.0))
    assert "[rank1]: OSError: y" in shown and shown.count("more") == 2
    recorded = measuring.Outcome(None, {"exception": "KeyError: 'x'"}, "a report", 1.0)
    assert measuring.why(recorded) == "KeyError: 'x'"


def test_results_are_written_whole(measuring: ModuleType, tmp_path: Path) -> None:
    measuring.write(tmp_path / "new" / "r.json", {"ä": 1})
    assert json.loads((tmp_path / "new" / "r.json").read_text()) == {"ä": 1}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.json"]


def test_about_names_device_and_versions(measuring: ModuleType) -> None:
    about = measuring.about("pytest", "no-such-package")
    assert about["versions"].keys() == {"torch", "Python", "pytest"}
    assert about["device"] and len(about["date"]) == 10
