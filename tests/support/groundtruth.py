"""The workloads of `tests/data/groundtruth`, by name, and what a GPU said of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

GROUND_TRUTH = Path(__file__).parent.parent / "data" / "groundtruth"
VARYING = ("gpt2-lengths", "opt-lengths")
"""Of the families, those whose steps have inputs of several lengths."""


def measured(kind: str) -> dict[str, Any]:
    """By workload, what was measured.

    Args:
        kind: "measured", "families", "compiled", "compiled_families"; "graphs" are workloads of both kinds
            under `mode="reduce-overhead"`, "graph_programs" small programs.
    """
    return {load["name"]: load for load in json.loads(_file(kind).read_text())}


def gpu(kind: str) -> str:
    """The kind of GPU that measured it."""
    return _file(kind).stem.removeprefix(f"{kind}_")


def _file(kind: str) -> Path:
    (file,) = GROUND_TRUTH.glob(f"{kind}_h*.json")
    return file


def workload(name: str, *, compiled: bool = False, mode: str | None = None) -> Callable[[Any], Any]:
    """The build function of a workload of any file.

    Args:
        compiled: compile its model, with fixed shapes unless its lengths vary, as `compiled_h200.json` says.
        mode: of `torch.compile`; None for the default one.
    """
    specs = json.loads((GROUND_TRUTH / "specs.json").read_text())
    spec = next((spec for spec in specs if spec["name"] == name), None)
    module = _module(
        "workloads" if spec else "graph_programs" if name in names("graph_programs") else "families"
    )
    spec = spec or {"name": name}

    def build(device: Any) -> Any:
        if not compiled:
            return module.build(spec, device)
        import torch

        torch.set_float32_matmul_precision("high")
        parts = module.build(spec, device)
        varies = isinstance(spec.get("seq"), list) or name in VARYING
        parts[0].compile(mode=mode, **({} if varies else {"dynamic": False}))
        return parts

    return build


def families() -> list[str]:
    """The names of the workloads of other families."""
    return names("families")


def names(file: str) -> list[str]:
    """The names of the workloads of "families" or "graph_programs"."""
    return [spec["name"] for spec in _module(file).SPECS]


@cache
def _module(file: str) -> Any:
    specification = importlib.util.spec_from_file_location(file, GROUND_TRUTH / f"{file}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
