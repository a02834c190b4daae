"""Scripts that were started plainly: the census from outside names the same holders as the census inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from memtriage.outside.census import take_census
from memtriage.outside.python_layout import layout_of

_TESTS = Path(__file__).resolve().parents[1]
_STEP = 4
_AGREED = 0.95
_SCRIPTS = (
    "leaking/class_level_list",
    "leaking/ctx_cache_kept",
    "leaking/default_argument_store",
    "leaking/dict_cache_keyed_by_offset",
    "leaking/exceptions_kept",
    "leaking/executor_futures_kept",
    "leaking/forward_hook_closure",
    "leaking/gradients_in_unbounded_deque",
    "leaking/graph_nodes_of_losses",
    "leaking/history_attribute",
    "leaking/losses_list_attached",
    "leaking/lru_cache_on_method",
    "leaking/numpy_views_of_tensors",
    "leaking/pack_hook_keeps_live_tensor",
    "leaking/partial_callbacks",
    "leaking/running_total_of_loss",
    "leaking/suspended_generators",
    "leaking/tensor_subclass_instances",
    "healthy/lbfgs_history_fills",
    "healthy/mixed_precision",
    "healthy/recent_deque_with_maxlen",
)

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(_TESTS / "support" / "stopped_script.py")]
    source = _TESTS / "zoo" / f"{request.param}.py"
    with (tmp_path / "stderr").open("w") as errors:
        job = subprocess.Popen(
            [*command, str(source), str(_STEP)],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        assert job.stdout is not None
        while (line := job.stdout.readline()) != "ready\n":
            assert line, (tmp_path / "stderr").read_text()
        yield job
    finally:
        job.kill()
        job.communicate()


@pytest.mark.parametrize("script", _SCRIPTS, indirect=True)
def test_the_same_holders_as_inside(script: subprocess.Popen[str]) -> None:
    found = take_census(script.pid, within_s=600)
    outside = Counter[tuple[str, str, str]]()
    for storage in found.storages:
        outside[storage.device, storage.holder or "", storage.owner] += storage.nbytes
    assert script.stdin is not None and script.stdout is not None
    script.stdin.write("go on\n")
    script.stdin.flush()
    inside = Counter[tuple[str, str, str]]()
    for device, holder, owner, nbytes in json.loads(script.stdout.readline()):
        if not holder.startswith("C++"):
            inside[device, holder, owner] += nbytes
    assert inside
    agreed = sum((inside & outside).values())
    assert agreed >= _AGREED * inside.total(), (inside - outside, outside - inside)
    assert found.moved == 0
