"""What `Out` alone keeps, and taking it out of all the places where IPython keeps it."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from memtriage.account.census import Look
from memtriage.integrations.notebook.outputs import behind_variables, drop_outputs, output_holds

KIB = 1 << 10


def kib(size: float) -> torch.Tensor:
    return torch.zeros(round(size * KIB), dtype=torch.uint8)


class Kept:
    """Stands for a value that a cell has shown."""


def test_ipython_s_names_come_after_the_user_s() -> None:
    namespace = dict.fromkeys(["_", "Out", "_oh", "x", "___", "get_ipython", "__", "_7", "y"], 0)
    behind_variables(namespace)
    assert list(namespace) == ["x", "_7", "y", "get_ipython", "_oh", "Out", "_", "__", "___"]


def test_outputs_that_alone_hold_tensors_are_found_largest_first(
    monkeypatch: pytest.MonkeyPatch, only_new_objects: None
) -> None:
    main: Any = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    whole = kib(128)
    main.named = kib(512)
    outputs = {
        1: kib(64),
        2: [kib(100), {"x": kib(28)}],
        3: main.named,
        4: kib(64 - 1 / KIB),
        5: (whole, whole[:KIB]),  # one storage, once
        6: "text",
        7: torch.nn.Linear(256, 256),
    }
    main._oh = main.Out = outputs
    main._ = outputs[7]
    del whole
    behind_variables(vars(main))
    gc.collect()
    with Look() as view:
        found = output_holds(view, outputs)
    assert [(each.number, each.bytes, each.kind) for each in found] == [
        (7, {"cpu": 257 * KIB}, "Linear"),
        (2, {"cpu": 128 * KIB}, "list"),
        (5, {"cpu": 128 * KIB}, "tuple"),
        (1, {"cpu": 64 * KIB}, "Tensor"),
    ]
    vars(main).clear()


def test_dropped_outputs_are_kept_nowhere() -> None:
    first, second, third = Kept(), Kept(), Kept()
    outputs = {3: first, 4: second, 5: third}
    namespace = {"_oh": outputs, "_3": first, "_4": second, "_5": third, "_": third, "__": second, "mine": 1}
    hidden = {"_4": second, "_5": third, "_": third}
    shell = SimpleNamespace(
        user_ns=namespace,
        user_ns_hidden=hidden,
        displayhook=SimpleNamespace(_=third, __=second, ___=first, other=1),
        last_execution_result=SimpleNamespace(result=third),
    )
    refs = [weakref.ref(first), weakref.ref(second), weakref.ref(third)]
    drop_outputs(shell, [4, 5, 9])
    del second, third
    assert [ref() is None for ref in refs] == [False, True, True]
    assert namespace == {"_oh": {3: first}, "_3": first, "_": "", "__": "", "mine": 1}
    assert hidden == {"_": ""}
    assert vars(shell.displayhook) == {"_": "", "__": "", "___": first, "other": 1}
    assert shell.last_execution_result.result is None


def test_what_was_not_dropped_stays_the_last_result() -> None:
    kept = Kept()
    shell = SimpleNamespace(
        user_ns={"_oh": {3: kept, 4: Kept()}, "_": kept},
        user_ns_hidden={},
        displayhook=SimpleNamespace(_=kept),
        last_execution_result=SimpleNamespace(result=kept),
    )
    drop_outputs(shell, [4])
    assert shell.last_execution_result.result is shell.user_ns["_"] is shell.displayhook._ is kept
    shell.last_execution_result = None
    drop_outputs(shell, [3])
    assert shell.user_ns == {"_oh": {}, "_": ""}
