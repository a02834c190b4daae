"""Metrics on a real GPU: stranded by the allocator's counter, scrapes beside training and graph capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memtriage
from memtriage.account.gpu_ledger import segment_totals
from memtriage.observe import cuda
from memtriage.session.core import Session
from support import censuses

MIB = 1 << 20
MOST_CALLS = 20_000
"""Of the model in one capture: a scrape lasts as long as some hundred of them."""


@pytest.mark.parametrize("size", [400_000, 3 * MIB, 9 * MIB])
def test_the_counter_of_stranded_bytes_is_what_the_segments_say(size: int) -> None:
    kept = {number: torch.empty(size, dtype=torch.uint8, device="cuda") for number in range(60)}
    kept[8].record_stream(torch.cuda.Stream())  # freed below, it may await that stream
    for number in range(60):
        if number % 7:
            del kept[number]
        totals = segment_totals(cuda.segments(0) or [])
        assert cuda.counters(0).inactive_split == totals.stranded
    assert totals.stranded > 0


EXPANDABLE = """
    import json, sys
    import torch
    import memtriage
    from memtriage.observe import cuda

    found = {}
    with memtriage.watch(sys.argv[1], quiet=True):
        kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(40)]
        del kept[::2]
        model = torch.nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        found["metric"] = memtriage.metrics().get("memtriage/cuda_0/stranded_bytes")
        found["expandable"] = cuda.expandable_segments()
        found["counter"] = cuda.counters(0).inactive_split
        (ledger,) = memtriage.ledger("cuda:0")
        found["ledger"] = sum(row.bytes for row in ledger.rows if row.row == "stranded")
    print(json.dumps(found))
"""


def test_with_expandable_segments_it_is_the_ledgers(tmp_path: Path, keep: Callable[[str, Any], None]) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(EXPANDABLE))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "record")],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    keep("metrics_expandable", report)
    assert report["expandable"] is True
    assert report["counter"] == 0  # it leaves these segments out
    assert report["metric"] == pytest.approx(report["ledger"], abs=4 * MIB)


def watched() -> Session:
    session = memtriage.process.active.session
    assert session is not None
    return session


def test_scrapes_beside_training_and_capture_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    censuses.leave_out(monkeypatch)
    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.randn(64, 512, device="cuda")
    stop = threading.Event()
    scraped: list[dict[str, float]] = []

    def scrape() -> None:
        while not stop.is_set():
            watched()._live._classes_due_s = 0.0
            scraped.append(memtriage.metrics())

    with memtriage.watch(tmp_path, quiet=True):
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        values = memtriage.metrics()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert values["memtriage/cuda_0/allocated_bytes"] == allocated
        assert values["memtriage/cuda_0/reserved_bytes"] == reserved
        assert values["memtriage/cuda_0/peak_allocated_bytes"] == torch.cuda.max_memory_allocated()
        assert values["memtriage/host/pinned_bytes"] >= 0
        scraper = threading.Thread(target=scrape)
        scraper.start()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):  # no thread may do what would end a capture
                before = len(scraped)
                for _ in range(MOST_CALLS):
                    out = model(batch)
                    if len(scraped) > before + 1:  # one has begun and ended meanwhile
                        break
            for _ in range(20):
                graph.replay()
                memtriage.step()
        finally:
            stop.set()
            scraper.join()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, model(batch))
    assert len(scraped) > 1 and all("memtriage/cuda_0/allocated_bytes" in each for each in scraped)
    del graph
    torch._C._cuda_clearCublasWorkspaces()  # one was made in the graph's pool, and keeps that alive
