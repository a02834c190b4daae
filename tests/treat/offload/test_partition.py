"""Two ranks over gloo (four with `-m long`): process group, DDP, FSDP2; see `partition_program.py`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("partition_program.py")
TIME_LIMIT_S = 300


def scenario_names() -> list[str]:
    return [
        node.name
        for node in ast.parse(PROGRAM.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """What each rank says of each scenario."""
    ranks = request.param
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(meeting)],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    for _, errors in outputs:
        sys.stderr.write(errors)
    return [
        dict(json.loads(line) for line in output.splitlines() if line.startswith("["))
        for output, _ in outputs
    ]


@pytest.mark.parametrize("name", scenario_names())
def test_scenario(outcomes: list[dict[str, str]], name: str) -> None:
    for rank, said in enumerate(outcomes):
        assert said.get(name, "was not reached") == "passed", f"rank {rank}: {said.get(name)}"
