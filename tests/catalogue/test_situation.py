"""What forbids clearing at an instant: a capture, captured graphs, a backward under way or pending."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from memtriage.catalogue.scene import Scene
from memtriage.catalogue.situation import (
    Conditions,
    cudagraph_managers,
    is_captured,
    pending_node,
    read_situation,
)
from memtriage.model.blocks import Segment
from memtriage.model.holders import CAPTURE_UNDER_WAY, Condition
from support.holder_standins import Stage

TREES = "CUDA graphs of torch.compile (cudagraph trees) may be replayed"
PENDING = "a backward pass is pending: {} still keeps tensors for it"


class Graph:
    """A CUDA graph: captured, or not yet, or reset."""

    def __init__(self, captured: bool) -> None:
        self.captured = captured

    def pool(self) -> tuple[int, int]:
        if not self.captured:
            raise RuntimeError("called without a preceding successful capture")
        return (1, 0)


def segment(pool: tuple[int, int]) -> Segment:
    return Segment(device=0, address=1 << 20, size=1 << 20, stream=0, pool=pool, expandable=False, blocks=())


def reasons(objects: Sequence[Any] = (), **options: Any) -> dict[Condition, str]:
    with Scene(objects) as scene:
        situation = read_situation(scene, **options)
    assert not situation.capture
    return dict(situation.reasons)


def product() -> torch.Tensor:
    weight = torch.ones(3, requires_grad=True)
    return (weight * weight).sum()


@pytest.mark.parametrize(
    ("situation", "conditions", "reason"),
    [
        (Conditions(), ("graphs", "backward"), None),
        (Conditions(reasons={"graphs": "a", "backward": "b"}), ("graphs", "backward"), "a"),
        (Conditions(reasons={"graphs": "a", "backward": "b"}), ("backward", "graphs"), "b"),
        (Conditions(reasons={"backward": "b"}), ("graphs", "backward"), "b"),
        (Conditions(reasons={"backward": "b"}), ("graphs",), None),
        (Conditions(reasons={"backward": "b"}), (), None),
        (Conditions(capture=True, reasons={"backward": "b"}), ("backward",), CAPTURE_UNDER_WAY),
        (Conditions(capture=True), (), CAPTURE_UNDER_WAY),
    ],
)
def test_a_capture_forbids_everything_and_a_reason_what_names_it(
    situation: Conditions, conditions: Sequence[Condition], reason: str | None
) -> None:
    assert situation.forbids(conditions) == reason


def test_a_capture_of_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtriage.observe.cuda.capturing", lambda: True)
    with Scene([]) as scene:
        assert read_situation(scene) == Conditions(capture=True)


@pytest.mark.parametrize(
    ("captured", "reason"),
    [
        ([], None),
        ([False], None),
        ([True, False], "1 CUDA graph captured, which may be replayed"),
        ([True, True], "2 CUDA graphs captured, which may be replayed"),
    ],
)
def test_captured_graphs_may_be_replayed(
    captured: list[bool], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_CUDAGraph", Graph, raising=False)
    graphs = [Graph(one) for one in captured]
    assert [is_captured(graph) for graph in graphs] == captured
    assert reasons(graphs).get("graphs") == reason


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ([], None),
        ([(0, 0)], None),
        ([(0, 7)], None),  # a pool made by hand need not serve a graph
        ([(0, 0), (3, 0), (3, 0)], "1 memory pool of a captured CUDA graph"),
    ],
)
def test_a_private_pool_tells_of_a_graph_that_only_c_plus_plus_holds(
    pools: list[tuple[int, int]], reason: str | None
) -> None:
    assert reasons(segments=[segment(pool) for pool in pools]).get("graphs") == reason


def test_cudagraph_trees_that_have_graphs(stage: Stage) -> None:
    with_graphs, without = (
        types.SimpleNamespace(tree_manager=object()),
        types.SimpleNamespace(tree_manager=None),
    )
    containers: dict[int, Any] = {0: without, 1: object()}
    local = types.SimpleNamespace()
    stage.module("torch._inductor.cudagraph_trees", local=local)
    assert (cudagraph_managers(), reasons()) == ([], {})
    local.tree_manager_containers = containers
    assert (cudagraph_managers(), reasons()) == ([], {})
    containers[2] = with_graphs
    assert (cudagraph_managers(), reasons()) == ([with_graphs], {"graphs": TREES})


def test_a_graph_is_pending_until_its_backward_has_run() -> None:
    loss = product()
    assert pending_node(iter([loss])) == "MulBackward0"
    assert reasons([loss]) == {"backward": PENDING.format("MulBackward0")}
    assert reasons([loss], leftovers={id(loss)}) == {}
    assert reasons([loss], between_steps=True) == {}
    loss.backward(retain_graph=True)
    assert reasons([loss]) == {"backward": PENDING.format("MulBackward0")}
    loss.backward()
    assert pending_node(iter([loss])) is None
    assert reasons([loss]) == {}


def test_tensors_without_a_graph_and_nodes_that_save_nothing_wait_for_nothing() -> None:
    plain = torch.ones(3)
    leaf = torch.ones(3, requires_grad=True)
    added = (leaf + 1) + (leaf + 2)
    assert pending_node(iter([plain, leaf, added])) is None
    assert reasons([plain, leaf, added, "text"]) == {}


def test_a_shared_node_is_looked_at_once_and_others_behind_it_still() -> None:
    weight = torch.ones(3, requires_grad=True)
    shared = weight + 1
    behind = (shared.exp() + shared) + shared
    assert pending_node(iter([shared, behind, behind])) == "ExpBackward0"


def test_graphs_of_tensors_without_data_have_no_backward_to_come() -> None:
    weight = torch.ones(3, requires_grad=True, device="meta")
    fake = weight * weight
    assert pending_node(iter([fake])) is None
    assert pending_node(iter([fake, product()])) == "MulBackward0"


def test_a_sparse_result_waits_like_any_other() -> None:
    weight = torch.eye(3, requires_grad=True)
    assert pending_node(iter([weight.to_sparse() * 2])) is not None


def test_a_backward_under_way_forbids_whatever_the_caller_says() -> None:
    seen: list[dict[Condition, str]] = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(reasons(between_steps=True)))
    weight.sum().backward()
    assert seen == [{"backward": "a backward pass is under way"}]
    assert reasons() == {}
