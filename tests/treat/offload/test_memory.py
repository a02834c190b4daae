"""Host bytes per parameter, by the resident set of a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from memtriage import OffloadedAdamW

PROGRAM = Path(__file__).with_name("memory_program.py")
PARAMETERS = 20_000_000
RING = 2 * 4 * (1 << 16) * 2
"""Bytes of four slots of 65,536 elements, 2 bytes each, in both directions."""

CONSTANT = RING + (4 << 20)
"""The ring, and what allocator and interpreter take for small things."""

TIME_LIMIT_S = 200


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    run = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert run.returncode == 0, run.stderr
    measured: dict[str, dict[str, int]] = json.loads(run.stdout)
    return measured


@pytest.mark.parametrize(
    ("kind", "bytes_per_parameter"),
    [("fp32 moments", 12), ("bf16 moments", 8), ("gradients on the host", 16)],
)
def test_host_bytes_per_parameter(
    found: dict[str, dict[str, int]], kind: str, bytes_per_parameter: int
) -> None:
    one = found[kind]
    # After four steps all of it exists, and nothing more; nor was there at any moment.
    assert one["stepped"] >= bytes_per_parameter * PARAMETERS
    assert one["stepped"] <= bytes_per_parameter * PARAMETERS + CONSTANT
    assert one["peak"] <= (bytes_per_parameter + 0.3) * PARAMETERS + CONSTANT
    # What is said to be reserved is what is used.
    assert abs(one["reserved"] - one["stepped"]) <= CONSTANT


@pytest.mark.parametrize("kind", ["fp32 moments", "bf16 moments", "gradients on the host"])
def test_state_comes_with_the_first_step_and_goes_with_close(
    found: dict[str, dict[str, int]], kind: str
) -> None:
    assert found[kind]["made"] <= CONSTANT
    assert found[kind]["closed"] <= CONSTANT


def test_a_checkpoint_is_saved_and_loaded_without_a_second_copy(found: dict[str, dict[str, int]]) -> None:
    assert found["checkpoint"]["saved"] <= CONSTANT
    assert found["checkpoint"]["loaded"] <= CONSTANT


def test_the_default_ring_is_as_large_as_documented() -> None:
    optimizer = OffloadedAdamW([Parameter(torch.zeros(64))])
    assert optimizer.host_bytes == (80 << 20) + 12 * 64
    optimizer.close()
