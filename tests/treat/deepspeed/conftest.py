"""Modules instead of DeepSpeed's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from support.deepspeed_standins import Install, make_accelerator, make_optimizer


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that puts modules instead of DeepSpeed's, and returns accelerator and optimizer class."""

    def put(accelerator: Any = None, optimizer: Any = None) -> tuple[Any, Any]:
        accelerator = accelerator or make_accelerator()
        optimizer = optimizer or make_optimizer(accelerator)
        contents: dict[str, dict[str, Any]] = {
            "deepspeed": {"__version__": "9.9"},
            "deepspeed.accelerator": {"get_accelerator": lambda: accelerator},
            "deepspeed.runtime": {},
            "deepspeed.runtime.zero": {},
            "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": optimizer},
        }
        for name, attributes in contents.items():
            module = ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
        return accelerator, optimizer

    return put
