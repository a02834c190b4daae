"""Longer slices of the interpreter, and whether the autograd engine is at work."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from memtriage.observe.alone import Alone, backward_runs

torch = pytest.importorskip("torch")


def test_the_slice_is_put_back() -> None:
    before = sys.getswitchinterval()
    with Alone():
        assert sys.getswitchinterval() > before
    assert sys.getswitchinterval() == before


def test_a_child_that_is_forked_meanwhile_has_the_usual_slice() -> None:
    usual = sys.getswitchinterval()
    with Alone():
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == usual else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_backward_is_seen_from_inside_it() -> None:
    seen: list[bool] = []
    parameter = torch.ones(3, requires_grad=True)
    parameter.register_hook(lambda gradient: seen.append(backward_runs()))
    assert not backward_runs()
    (parameter * 2).sum().backward()
    assert torch.autograd.grad((parameter * 2).sum(), parameter)[0].sum() == 6
    assert not backward_runs()
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("file", "name", "is_engine"),
    [
        ("/venv/torch/autograd/graph.py", "_engine_run_backward", True),
        ("/venv/torch/autograd/graph.py", "allow_mutation", False),
        ("train.py", "_engine_run_backward", False),
    ],
)
def test_the_engine_is_known_by_its_function_and_its_file(file: str, name: str, is_engine: bool) -> None:
    names: dict[str, Any] = {"backward_runs": backward_runs}
    exec(compile(f"def {name}(): return backward_runs()", file, "exec"), names)
    assert names[name]() is is_engine
