"""What forbids clearing at this instant: a capture, captured CUDA graphs, a backward under way or pending."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memtriage.catalogue.contents import class_of
from memtriage.catalogue.scene import Scene
from memtriage.model.blocks import Segment
from memtriage.model.holders import CAPTURE_UNDER_WAY, Condition
from memtriage.observe import autograd, cuda
from memtriage.observe.classes import name_of
from memtriage.observe.tensors import plain


@dataclass(frozen=True, slots=True)
class Conditions:
    """What holds at one instant.

    Attributes:
        capture: the current stream captures a CUDA graph.
        reasons: for each condition that holds, what shows it.
    """

    capture: bool = False
    reasons: Mapping[Condition, str] = field(default_factory=dict)

    def forbids(self, conditions: Sequence[Condition]) -> str | None:
        """Why an entry with these conditions must not be cleared now; None where it may."""
        if self.capture:
            return CAPTURE_UNDER_WAY
        return next((self.reasons[condition] for condition in conditions if condition in self.reasons), None)


def read_situation(
    scene: Scene,
    segments: Sequence[Segment] | None = None,
    leftovers: Collection[int] = (),
    *,
    between_steps: bool = False,
) -> Conditions:
    """Look at this process.

    Args:
        segments: the allocator's segments, where they were read: private pools tell of graphs too that only
            C++ holds.
        leftovers: ids of tensors whose graphs are left over from finished steps, and are not pending.
        between_steps: the program says that no graph is pending.

    Known limitations: a capture on another stream or thread, and a backward that runs in another thread,
    are not seen. A custom Function that keeps its tensors on `ctx` alone looks done before its backward. The
    workspace that cuBLAS made during a capture keeps the graph's pool when the graph has gone, which looks
    like a graph that only C++ holds; `torch._C._cuda_clearCublasWorkspaces()` ends that.
    """
    reasons: dict[Condition, str] = {}
    graphs = _graphs(scene, segments or ())
    if graphs is not None:
        reasons["graphs"] = graphs
    backward = _running() or (None if between_steps else _pending(scene, leftovers))
    if backward is not None:
        reasons["backward"] = backward
    return Conditions(cuda.capturing(), reasons)


def _graphs(scene: Scene, segments: Sequence[Segment]) -> str | None:
    captured = sum(map(is_captured, scene.subclasses("torch._C", "_CUDAGraph")))
    if captured:
        return f"{captured} CUDA graph{'s' if captured > 1 else ''} captured, which may be replayed"
    if cudagraph_managers():
        return "CUDA graphs of torch.compile (cudagraph trees) may be replayed"
    # A pool whose id begins with 0 was made by hand: `MemPool`, which need not serve a graph.
    pools = {segment.pool for segment in segments if segment.pool[0]}
    return f"{len(pools)} memory pool of a captured CUDA graph" if pools else None


def is_captured(graph: Any) -> bool:
    try:
        graph.pool()  # raises unless a capture has ended, and none was reset since
    except RuntimeError:
        return False
    return True


def cudagraph_managers() -> list[Any]:
    """Containers of this thread's cudagraph trees that have graphs; without making the first of them."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", None) or {}
    return [
        container for container in containers.values() if getattr(container, "tree_manager", None) is not None
    ]


def _running() -> str | None:
    current = getattr(getattr(sys.modules.get("torch"), "_C", None), "_current_graph_task_id", None)
    return "a backward pass is under way" if current is not None and current() != -1 else None


def _pending(scene: Scene, leftovers: Collection[int]) -> str | None:
    node = pending_node(tensor for tensor in _tensors(scene) if id(tensor) not in leftovers)
    if node is None:
        return None
    return f"a backward pass is pending: {node} still keeps tensors for it"


def _tensors(scene: Scene) -> Iterator[Any]:
    base = class_of("torch", "Tensor")
    return scene.instances(lambda kind: issubclass(kind, base))


def pending_node(tensors: Iterator[Any]) -> str | None:
    """Type of a node, in the graph of any of the tensors, that still has saved tensors; None without one.

    Backward frees them, unless the graph is retained.
    """
    reader = autograd.NodeReader()
    waiting: list[Any] = []
    for tensor in tensors:
        try:
            node = plain(tensor).grad_fn
        except RuntimeError:  # functorch wrappers, views whose base was changed in a forbidden way
            continue
        if node is not None and not _is_fake(tensor):
            waiting.append(node)
    seen: set[int] = set()
    for node in waiting:
        if id(node) in seen:
            continue
        seen.add(id(node))
        if next(reader.saved_values(node), None) is not None:
            return name_of(type(node))
        waiting += autograd.next_nodes(node)  # which also keeps the nodes: an id outlives none
    return None


def _is_fake(tensor: Any) -> bool:
    """Whether a tensor has no data, and its graph no backward to come: torch.compile keeps such ones."""
    try:
        return str(plain(tensor).untyped_storage().device.type) == "meta"
    except (RuntimeError, NotImplementedError):  # sparse layouts, functorch wrappers
        return False
