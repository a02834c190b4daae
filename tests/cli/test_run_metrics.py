"""`memtriage run --metrics` end to end: scripts in processes of their own, which scrape themselves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

SCRIPT = """
    import sys
    import urllib.request

    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for step in range(20):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        kept.append(torch.zeros(1 << 18))
    with urllib.request.urlopen(sys.argv[1], timeout=10) as answer:
        print(answer.read().decode())
"""
WITHOUT_STEPS = """
    import sys
    import urllib.request

    for url in sys.argv[1:]:
        with urllib.request.urlopen(url, timeout=10) as answer:
            print(answer.read().decode())
    print("done", file=sys.stderr)
"""


def run(
    folder: Path, source: str, address: str, *args: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "memtriage", "run", "-o", str(folder / "runs"), "--metrics", address]
    return subprocess.run(
        [*command, "--json", str(folder / "report.json"), str(script), *args],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def served(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def test_a_running_script_serves_where_it_stands_and_who_grows(tmp_path: Path) -> None:
    port = free_port()
    done = run(tmp_path, SCRIPT, str(port), f"http://127.0.0.1:{port}/metrics")
    assert done.returncode == 0, done.stderr
    assert f"memtriage: metrics at http://127.0.0.1:{port}/metrics\n" in done.stderr
    body = served(done.stdout)
    assert body["memtriage_steps"] == [({"rank": "0"}, 20)]
    ((labels, rate),) = body["memtriage_leak_growth_per_step_bytes"]
    assert "kept[*]" in labels["holder"] and labels["device"] == "cpu"
    assert 1 << 20 <= rate < 1.1 * (1 << 20)
    ((_, growth),) = body["memtriage_memory_growth_per_step_bytes"]
    assert growth >= 1 << 20
    classes = sum(value for _, value in body["memtriage_host_class_bytes"])
    ((_, rss),) = body["memtriage_host_rss_bytes"]
    assert classes == pytest.approx(rss, rel=0.1)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "leak"


def test_a_taken_port_is_one_line_and_the_script_goes_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, WITHOUT_STEPS, str(port))
    assert done.returncode == 0 and "done\n" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "metrics" in line]
    assert line.startswith(f"memtriage: no metrics at http://127.0.0.1:{port}/metrics: ")
