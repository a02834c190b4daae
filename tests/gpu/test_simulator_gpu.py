"""The allocator simulator against this GPU's allocator, under settings of every kind.

Every case is a process of its own; all run at once. With `OUT` set to a folder, the recordings are left
there, to become test data for machines without a GPU (`tests/data/allocator_traces`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memtriage.allocator.settings import parse_conf, parse_version
from memtriage.allocator.trace_columns import StackTable, trace_columns
from memtriage.model.recording import FREE_COMPLETED, OOM, SEGMENT_FREE, SEGMENT_UNMAP
from memtriage.observe.cuda import parse_segments
from memtriage.snapshots.file import loaded
from support.fidelity import compare

RECORDER = Path(__file__).with_name("record_trace.py")
DEADLINE_S = 120
CAP_BYTES = 1 << 30
"""What the cases under pressure may reserve: `churn` would take 1.3 GiB."""

TOTAL = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 2 * CAP_BYTES
CAP = f"per_process_memory_fraction:{CAP_BYTES / TOTAL:.5f}"
ROOMIER_CAP = f"per_process_memory_fraction:{1.25 * CAP_BYTES / TOTAL:.5f}"

CASES = {
    "default": ("churn_on_streams", ""),
    "default_capped": ("churn", CAP),
    "expandable": ("churn_on_streams", "expandable_segments:True"),
    "expandable_train": ("train", "expandable_segments:True"),
    "expandable_capped": ("churn_without_flushes", f"expandable_segments:True,{CAP}"),
    "max_split": ("churn_of_large", "max_split_size_mb:256"),
    "max_split_capped": ("churn_without_flushes", f"max_split_size_mb:64,{CAP}"),
    "max_split_train": ("train", "max_split_size_mb:256"),
    "divisions": ("churn", "roundup_power2_divisions:[2:1,64:4,128:8,>:2]"),
    "collecting": ("churn_without_flushes", f"garbage_collection_threshold:0.6,{ROOMIER_CAP}"),
    "collecting_capped": ("churn_without_flushes", f"garbage_collection_threshold:0.6,{CAP}"),
    "pools": ("pools", ""),
    "pools_expandable": ("pools", "expandable_segments:True"),
}
if parse_version(torch.__version__) >= (2, 11):
    CASES["large_segments"] = ("churn", "large_segment_size_mb:64")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Every case, recorded."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = Path(os.environ.get("OUT") or tmp_path_factory.mktemp("recordings"))
    paths = {name: folder / f"{name}.pickle.gz" for name in CASES}
    running = {
        name: subprocess.Popen(
            [sys.executable, str(RECORDER), program, str(paths[name])],
            env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf},
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (program, conf) in CASES.items()
    }
    try:
        for name, process in running.items():
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, f"{name}: {errors[-2000:]}"
        yield paths
    finally:
        for process in running.values():
            process.kill()


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_does_what_the_allocator_did(name: str, recordings: dict[str, Path]) -> None:
    path = recordings[name]
    made_with = json.loads(path.with_name(f"{name}.json").read_text())
    with loaded(path) as raw:
        trace = trace_columns(raw["device_traces"][0], StackTable())
        segments = parse_segments(raw["segments"], 0)
    settings = parse_conf(made_with["conf"], made_with["torch"])
    comparison = compare(trace, segments, settings, device_memory=made_with["device_memory"])
    assert comparison.difference is None
    assert comparison.events == (trace.kind <= FREE_COMPLETED).sum() > 0
    if name.endswith("_capped"):
        assert (
            (trace.kind == OOM).any()
            or (trace.kind == SEGMENT_FREE).any()
            or (trace.kind == SEGMENT_UNMAP).any()
        )
