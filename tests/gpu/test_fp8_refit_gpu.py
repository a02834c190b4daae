"""The case `fp8_refit` on a GPU, small: weights arrive over CUDA IPC, memtriage leaves next to nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

LOOP = Path(__file__).parents[2] / "cases" / "fp8_refit" / "loop.py"
AFTER_REFIT = re.compile(r"GPU Memory after refit complete: ([0-9.]+)GB allocated, ([0-9.]+)GB reserved")
ALLOWED_GB = 0.1


def run(*arguments: str, **environment: str) -> str:
    """What the loop prints. It compares the weights on both sides itself and fails if they differ."""
    done = subprocess.run(
        [sys.executable, str(LOOP), "--library", "standin", "--quick", "--steps", "2", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def memory(printed: str) -> list[tuple[float, float]]:
    return [(float(allocated), float(reserved)) for allocated, reserved in AFTER_REFIT.findall(printed)]


def losses(printed: str) -> list[str]:
    return re.findall(r"loss ([0-9.e+-]+)", printed)


@cache
def plain() -> str:
    """One run for several tests."""
    return run("--treatment", "none")


def test_plain_fp8_strands_memory() -> None:
    allocated, reserved = memory(plain())[-1]
    assert reserved > 2 * allocated + ALLOWED_GB


def test_memtriage_leaves_next_to_nothing_and_changes_no_loss() -> None:
    treated = run("--treatment", "memtriage")
    assert len(memory(treated)) == 2
    for allocated, reserved in memory(treated):
        assert reserved <= 1.1 * allocated + ALLOWED_GB
    assert losses(treated) == losses(plain())


def test_training_is_primed_for_what_it_made_before() -> None:
    primed = re.findall(r"end of training: .*, primed ([0-9.]+)GB", run("--treatment", "memtriage"))
    assert len(primed) == 1 and float(primed[0]) > 1
    assert "primed" not in run("--treatment", "memtriage-unprimed").replace("memtriage-unprimed", "")


def test_expandable_segments_go_through_ipc() -> None:
    printed = run("--treatment", "clear", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert len(memory(printed)) == 2
