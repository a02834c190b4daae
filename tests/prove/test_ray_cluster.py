"""Trials on a Ray cluster: what they ask for, how they come back; and a real one, where Ray is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtriage.model.trials import TrialsReport
from memtriage.prove.ray_cluster import Demand, demand_of, pack, unpack
from memtriage.prove.table import TrialsError
from support.trials import HEAD, trials_of


def test_what_a_trial_asks_for(tmp_path: Path) -> None:
    two = trials_of(tmp_path, "a", head=HEAD + "ranks = 2\n")
    assert demand_of(two, [{"CPU": 8}, {"CPU": 16, "GPU": 4}]) == Demand(gpus=2, cpus=2)
    assert demand_of(two, [{"CPU": 8}]) == Demand(gpus=0, cpus=2)
    given = trials_of(tmp_path, "a", more="[ray]\ngpus = 0.5\ncpus = 3\n")
    assert demand_of(given, [{"CPU": 8, "GPU": 1}]) == Demand(gpus=0.5, cpus=3)


def test_what_no_node_has_is_refused_at_once(tmp_path: Path) -> None:
    eight = trials_of(tmp_path, "a", head=HEAD + "ranks = 8\n")
    with pytest.raises(TrialsError, match=r"8 GPUs .*\(the most GPUs are 4\)"):
        demand_of(eight, [{"CPU": 64, "GPU": 4}, {"CPU": 64, "GPU": 4}])
    asked = trials_of(tmp_path, "a", more="[ray]\ngpus = 1\n")
    for nodes in ([], [{"CPU": 64}]):
        with pytest.raises(TrialsError, match=r"\(the most GPUs are 0\)"):
            demand_of(asked, nodes)


def test_how_many_fit() -> None:
    assert Demand(gpus=2, cpus=1).fits({"GPU": 5, "CPU": 16}) == 2
    assert Demand(gpus=0, cpus=4).fits({"CPU": 16}) == 4
    assert Demand(gpus=0.5, cpus=1).fits({"GPU": 1, "CPU": 1}) == 1
    assert Demand(gpus=1, cpus=1).fits({"CPU": 16}) == 0
    assert Demand(gpus=0, cpus=0).fits({}) == 1


def test_a_folder_travels(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "record").mkdir(parents=True)
    (there / "record" / "rank").write_text("line\n")
    here.mkdir()
    (here / "stale").touch()
    unpack(pack(there), here)
    assert sorted(str(path.relative_to(here)) for path in here.rglob("*")) == ["record", "record/rank"]
    assert (here / "record" / "rank").read_text() == "line\n"


def test_a_real_cluster(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import memtriage, sys\n"
        "for step in range(5):\n"
        "    memtriage.step()\n"
        "if len(sys.argv) > 1: raise ValueError('no such layer')\n"
    )
    (tmp_path / "trials.toml").write_text(
        '[trials]\nscript = "job.py"\nwarmup = 1\nrepeats = 1\n[ray]\ngpus = 0\ncpus = 1\n'
        '[[variant]]\nname = "good"\n[[variant]]\nname = "bad"\nargs = ["x"]\n'
    )
    command = [sys.executable, "-m", "memtriage", "compare", "trials.toml", "-o", "out", "--ray", "--json"]
    env = os.environ | {"RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    report = msgspec.json.decode(done.stdout, type=TrialsReport)
    good, bad = report.variants
    assert (good.finished, good.steps) == (1, 3)  # a census is in the time of the fourth
    assert (bad.finished, bad.failures[0].kind) == (0, "crashed")
    assert "no such layer" in bad.failures[0].error
    assert Path(bad.failures[0].log).is_file()
