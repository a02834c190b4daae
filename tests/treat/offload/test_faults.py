"""What goes wrong, and that nothing is silently wrong afterwards."""

from __future__ import annotations

import errno
import json
import mmap
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from support.offload import (
    give_gradients,
    make,
    masters_of,
    parameters,
    same_bits,
)

PROGRAM = Path(__file__).with_name("fault_program.py")
TIME_LIMIT_S = 120


def test_memory_that_is_gone_is_noticed_before_anything_changes() -> None:
    weights = parameters([(300,), (200,)])
    optimizer = make([("first", weights[0]), ("second", weights[1])])
    give_gradients(weights, masters_of(weights), seed=0)
    storage = weights[1].untyped_storage()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="memory of second has been freed"):
        optimizer.step()
    storage.resize_(400)
    assert weights[1].grad is not None
    weights[1].grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="gradient of second has been freed"):
        optimizer.step()
    assert same_bits(weights[0].detach(), parameters([(300,)])[0].detach())
    assert not optimizer.state


def test_parameters_that_became_others_are_named() -> None:
    weight = Parameter(torch.ones(30))
    optimizer = make([("w", weight)])
    weight.data = torch.ones(40)
    weight.grad = torch.ones(40)
    with pytest.raises(RuntimeError, match=r"w was \(30,\) torch.float32 .* is \(40,\)"):
        optimizer.step()


def test_host_memory_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make(parameters())

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"11\.8 KiB of host memory"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3000))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(MemoryError):
        make(parameters())


def test_killed_in_the_middle_of_a_step_and_resumed(tmp_path: Path) -> None:
    """The checkpoint of the step before leads to the same bits as never having been killed."""
    killed = subprocess.run(
        [sys.executable, str(PROGRAM), "killed", str(tmp_path / "checkpoint")],
        capture_output=True,
        timeout=TIME_LIMIT_S,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)

    weights, resumed = parameters(), parameters(seed=5)
    optimizer, again = make(weights), make(resumed)
    with torch.no_grad():
        for one, value in zip(resumed, saved["weights"], strict=True):
            one.copy_(value)
    again.load_state_dict(saved["optimizer"])
    for step in range(4):
        give_gradients(weights, masters_of(weights), seed=step)
        optimizer.step()
        if step >= 2:
            give_gradients(resumed, masters_of(resumed), seed=step)
            again.step()
    for weight, two in zip(weights, resumed, strict=True):
        assert same_bits(weight.detach(), two.detach())
        assert same_bits(optimizer.state[weight]["master"], again.state[two]["master"])


def test_a_limit_on_address_space(tmp_path: Path) -> None:
    """The system refuses in earnest: the error names the size, model and process go on."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), "limited", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["error"].startswith("the system refused 76.3 MiB of host memory")
    assert told["weights_untouched"]
    assert told["smaller_one_works"]
