"""The short forms of the long benchmarks: they run, and print what their documentation says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def short(name: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The printed lines and the result of a benchmark's short form."""
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--short", "--json", str(result)],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), json.loads(result.read_text())


def test_detection_benchmark_has_no_false_alarm_or_miss(tmp_path: Path) -> None:
    printed, result = short("detection.py", tmp_path)
    healthy = result["healthy"]  # some move more than all that is in use
    assert set(healthy) <= {"CLEAN", "NOT JUDGED"} and healthy["CLEAN"] >= 57
    (summary,) = (line for line in printed if line.startswith("steady, above the limit:"))
    assert summary.endswith("100.0%; 0 CLEAN")
    for row in result["leaking"]:
        assert row["series"] == sum(row.get(word, 0) for word in ("LEAK", "NOT JUDGED", "CLEAN"))
        assert row.get("found", 0) <= row.get("LEAK", 0)
    assert sum(result["programs"]["healthy"].values()) == 15
    assert "leak" not in result["programs"]["healthy"]


def test_a_soak_reads_both_processes_at_each_stop(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    printed, result = short("soak.py", tmp_path)
    assert [line.split()[0] for line in printed[1:]] == ["10", "100", "1,000"]
    watched, bare = result["watched"], result["bare"]
    assert [stop["steps"] for stop in watched] == [stop["steps"] for stop in bare] == [10, 100, 1000]
    assert all(stop["record"] == stop["mark"] == 0 for stop in bare)
    assert all(stop["mark"] > 0 for stop in watched)
    assert 0 < watched[0]["record"] < watched[1]["record"] < watched[2]["record"]
    assert watched[2]["malloc"] - bare[2]["malloc"] < 16 << 20
