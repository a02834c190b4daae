"""What the installed torch can show memtriage."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from memtriage.model.machine import Fact


@dataclass(frozen=True, slots=True)
class _Capability:
    """Something that newer releases of torch can show, or a CUDA build only."""

    name: str
    path: str
    since: str
    parameter: str | None = None


_CAPABILITIES: Final = (
    _Capability("tensors saved for backward", "_C._autograd.SavedTensor.data", "2.10"),
    _Capability("allocation history", "cuda.memory._record_memory_history", "2.8"),
    _Capability("history without some actions", "cuda.memory._record_memory_history", "2.11", "skip_actions"),
    _Capability(
        "history of pinned memory", "cuda.memory._record_memory_history", "2.14", "record_pinned_host_memory"
    ),
    _Capability("segments without traces", "cuda.memory.memory_snapshot", "2.11", "include_traces"),
    _Capability("stack of a live block", "cuda.memory._allocation_traceback", "2.12"),
    _Capability("labels on traces", "cuda.memory._set_memory_metadata", "2.10"),
    _Capability("labels on tensors", "cuda.memory._annotate_tensor", "2.14"),
    _Capability("pinned-memory statistics", "cuda.memory.host_memory_stats", "2.8"),
    _Capability("release of pinned memory", "accelerator.empty_host_cache", "2.12"),
    _Capability("hook on new graph nodes", "autograd.graph.node_creation_hook", "2.14"),
    _Capability("pools that never split", "cuda.MemPool", "2.10", "no_split"),
)
_OOM_OBSERVERS: Final = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")


def capabilities(torch: ModuleType) -> Iterator[Fact]:
    """List what this torch can show memtriage, and from which release on it can show more."""
    for capability in _CAPABILITIES:
        there = _offers(torch, capability)
        yield Fact(
            section="capabilities",
            name=capability.name,
            value="yes" if there else "no",
            status="ok" if there else "note",
            advice=None if there else f"torch {capability.since} and newer.",
        )
    observes = any(hasattr(torch._C, name) for name in _OOM_OBSERVERS)
    yield Fact(
        section="capabilities",
        name="view into an out-of-memory",
        value="yes" if observes else "no",
        status="ok" if observes else "note",
        advice=None if observes else "CUDA builds of torch only.",
    )


def _offers(torch: ModuleType, capability: _Capability) -> bool:
    function: Any = torch
    for name in capability.path.split("."):
        function = getattr(function, name, None)
    if function is None or capability.parameter is None:
        return function is not None
    try:
        return capability.parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
