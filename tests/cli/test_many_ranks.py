"""A job of many ranks, made as benchmarks/many_ranks.py makes it, reported in every form."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memtriage.report.html.shell import LARGEST

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_ranks.py"
RANKS, MARKS = 64, 100


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("many_ranks", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def job(benchmark: ModuleType) -> Any:
    return benchmark.Job(RANKS, MARKS)


@pytest.fixture(scope="module")
def directory(benchmark: ModuleType, job: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    benchmark.make(job, folder)
    return folder


def reported(directory: Path, *options: str) -> str:
    command = [sys.executable, "-m", "memtriage", "report", str(directory), *options]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment, encoding="utf-8"
    )
    return done.stdout


def test_the_json_names_all_that_stand_out(directory: Path, job: Any) -> None:
    report = json.loads(reported(directory, "--json"))
    assert report["verdict"] == "leak"
    assert report["ranks"] == {"seen": RANKS, "of": RANKS}
    assert report["steps"] == job.steps
    leaks = [finding for finding in report["findings"] if finding["kind"] == "leak"]
    assert [finding["rank"] for finding in leaks] == [job.leaking]
    compared = report["rank_groups"]
    stage = RANKS // 4
    apart = {job.leaking, job.reserving, job.killed, job.sparse}
    assert [group["ranks"] for group in compared["groups"]] == [
        [rank for rank in range(3 * stage) if rank not in apart],
        [rank for rank in range(3 * stage, RANKS) if rank not in apart],
    ]
    outliers = {outlier["rank"]: outlier for outlier in compared["outliers"]}
    assert set(outliers) == apart
    assert outliers[job.killed]["killed"] and outliers[job.killed]["last_step"] == job.steps // 3
    assert [difference["figure"] for difference in outliers[job.reserving]["differs"]] == ["reserved", "peak"]
    assert [difference["figure"] for difference in outliers[job.sparse]["differs"]] == ["marks"]
    assert outliers[job.leaking]["differs"][0]["figure"] == "growth"
    # Each rank whose memory stands out has its finding, and no other rank has one.
    differing = {finding["rank"] for finding in report["findings"] if finding["kind"] == "rank_differs"}
    assert differing == {job.leaking, job.reserving}
    marked = {mark["rank"] for mark in report["marks"]}
    assert marked == set(range(RANKS))


def test_the_terminal_says_it_in_a_few_lines(directory: Path, job: Any) -> None:
    lines = reported(directory).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith(f"{RANKS} ranks"))
    assert lines[first] == f"{RANKS} ranks  4 of them stand out; compared at the end of step {job.steps}"
    block = " ".join(" ".join(lines[first + 1 : lines.index("", first)]).split())
    assert "45 ranks alike (" in block and "15 ranks alike (" in block
    assert f"rank {job.leaking}: leaks 24.0 MiB per step" in block
    assert f"rank {job.reserving}: +5.9 GiB reserved" in block
    assert f"rank {job.killed}: killed at step {job.steps // 3}" in block
    assert f"rank {job.sparse}: 52 marks (readings of the counters) where the others have 100" in block
    assert f"  - rank {job.killed} was killed: last seen at step {job.steps // 3}" in "\n".join(lines)
    assert "1 cut or garbled line left out, in 1 of 64 records" in "\n".join(lines)


def test_the_page_is_small(directory: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    reported(directory, "--html", str(page))
    assert 100_000 < page.stat().st_size < LARGEST
    assert "How the ranks compare" in page.read_text("utf-8")
