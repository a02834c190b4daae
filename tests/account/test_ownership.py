"""The rules by which a tensor is a parameter or a gradient, on a heap that is made up of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from memtriage.account.ownership import PRIORITY, Owners, TensorFacts
from memtriage.account.path_rules import Path, root_path
from memtriage.model.census import Owner
from memtriage.model.paths import PathSegment, SegmentKind
from support.paths import named


@dataclass
class Heap:
    """As much of a walked heap as the rules ask for; each object is held by the one at its parent's place."""

    parents: list[int]
    modules: list[int] = field(default_factory=list)
    optimizers: list[int] = field(default_factory=list)
    first_garbage: int = 1 << 30

    def kind(self, position: int) -> int:
        return 0


class Facts(TensorFacts):
    """Tensors are whole numbers, in lists below attributes; the one at a position is its number."""

    def __init__(self, heap: Heap, **known: Any) -> None:
        self.walked = heap
        self.attributes_of: dict[int, dict[str, Any]] = known.get("attributes", {})
        self.tensors: dict[int, int] = known.get("tensors", {})
        self.wrappers: set[int] = known.get("wrappers", set())
        self.kept: list[int] = known.get("saved", [])
        self.grads: list[int] = known.get("gradients", [])
        self.modules: dict[int, str] = known.get("modules", {})
        self.paths: dict[int, Path] = known.get("paths", {})

    def path(self, position: int) -> Path:
        return self.paths.get(position, root_path(*named("x")))

    def attributes(self, position: int) -> Mapping[str, Any]:
        return self.attributes_of.get(position, {})

    def tensors_in(self, value: Any, depth: int) -> Iterable[int]:
        if isinstance(value, int):
            yield value
        elif isinstance(value, list) and depth > 0:
            for each in value:
                yield from self.tensors_in(each, depth - 1)

    def saved(self) -> Iterable[int]:
        return self.kept

    def gradients(self) -> Iterable[int]:
        return self.grads

    def tensor_at(self, position: int) -> int | None:
        return self.tensors.get(position)

    def is_wrapper(self, position: int) -> bool:
        return position in self.wrappers

    def module_at(self, position: int) -> str:
        return self.modules.get(position, "")


def nested(tensor: int, levels: int) -> Any:
    return tensor if levels == 0 else [nested(tensor, levels - 1)]


@pytest.mark.parametrize(
    ("known", "owner"),
    [
        pytest.param({}, "variable", id="nothing"),
        pytest.param({"attributes": {0: {"_parameters": [7]}}}, "parameter", id="parameter"),
        pytest.param({"attributes": {0: {"_buffers": [7]}}}, "buffer", id="buffer"),
        pytest.param({"attributes": {0: {"_parameters": [[7]]}}}, "variable", id="below a parameter"),
        pytest.param({"attributes": {0: {"other": [7]}}}, "variable", id="attribute of a module"),
        pytest.param({"attributes": {1: {"param_groups": nested(7, 4)}}}, "parameter", id="of a group"),
        pytest.param({"attributes": {1: {"state": nested(7, 4)}}}, "optimizer state", id="state"),
        pytest.param({"attributes": {1: {"state": nested(7, 5)}}}, "variable", id="too deep in the state"),
        pytest.param({"attributes": {1: {"flat": nested(7, 2)}}}, "optimizer state", id="master weights"),
        pytest.param({"attributes": {1: {"flat": nested(7, 3)}}}, "variable", id="too deep for these"),
        pytest.param({"saved": [7]}, "saved for backward", id="saved"),
        pytest.param({"gradients": [7]}, "gradient", id="gradient"),
        pytest.param({"saved": [7], "gradients": [7]}, "gradient", id="a gradient that is saved"),
        pytest.param(
            {"saved": [7], "attributes": {0: {"_parameters": [7]}, 1: {"state": [7]}}, "gradients": [7]},
            "parameter", id="a parameter that is all of these",
        ),
        pytest.param({"attributes": {0: {"_buffers": [7]}}, "saved": [7]}, "buffer", id="a saved buffer"),
    ],
)  # fmt: skip
def test_what_structures_say_of_a_tensor(known: dict[str, Any], owner: Owner) -> None:
    heap = Heap(parents=[-1, -1, -1], modules=[0], optimizers=[1])
    assert Owners(Facts(heap, tensors={2: 7}, **known)).of(2) == owner


def test_master_weights_of_a_wrapper_are_state_though_the_optimizer_inside_trains_them() -> None:
    heap = Heap(parents=[-1, -1, -1], optimizers=[0, 1])
    attributes = {0: {"param_groups": [[7]]}, 1: {"flat": [7]}}
    assert Owners(Facts(heap, tensors={2: 7}, attributes=attributes)).of(2) == "optimizer state"
    alone = Facts(heap, tensors={2: 7}, attributes={0: attributes[0]})
    assert Owners(alone).of(2) == "parameter"


@pytest.mark.parametrize(
    ("above", "wrapper", "owner"),
    [
        pytest.param(1, True, "parameter", id="of a subclass"),
        pytest.param(1, False, "variable", id="of an ordinary tensor"),
        pytest.param(3, True, "parameter", id="three holders up"),
        pytest.param(4, True, "variable", id="too far up"),
    ],
)
def test_an_inner_tensor_is_what_its_wrapper_is(above: int, wrapper: bool, owner: Owner) -> None:
    """A chain of holders, of which the first is the wrapper and the last the inner tensor."""
    heap = Heap(parents=[-1, *range(above)], modules=[above + 1])
    facts = Facts(
        heap, tensors={0: 7, above: 8}, wrappers={0} if wrapper else set(),
        attributes={above + 1: {"_parameters": [7]}},
    )  # fmt: skip
    assert Owners(facts).of(above) == owner


def test_what_nothing_leads_to_is_garbage_unless_it_is_declared() -> None:
    heap = Heap(parents=[-1, 0, 1], first_garbage=1)
    facts = Facts(heap, tensors={0: 6, 1: 7, 2: 8}, gradients=[8])
    assert [Owners(facts).of(position) for position in (0, 1, 2)] == ["variable", "garbage", "gradient"]


VARIABLE = PathSegment(SegmentKind.VARIABLE, "x")
NODE = (PathSegment(SegmentKind.GRAD_FN, "MulBackward0"),)


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        (Path(((VARIABLE,), NODE, (PathSegment(SegmentKind.SAVED, "self"),)), 1), "saved for backward"),
        (Path(((VARIABLE,), NODE, (PathSegment(SegmentKind.CONTEXT, "kept"),)), 1), "autograd context"),
        (Path(((VARIABLE,), NODE, (PathSegment(SegmentKind.CONTEXT, ""),)), 1), "variable"),
        (
            Path(((VARIABLE,), NODE, (PathSegment(SegmentKind.CONTEXT, "kept"),),
                  (PathSegment(SegmentKind.SAVED, "self"),)), 1),
            "autograd context",
        ),
        (root_path(PathSegment(SegmentKind.LRU_CACHE, "mask")), "known cache"),
        (root_path(VARIABLE), "variable"),
    ],
)  # fmt: skip
def test_without_a_declaration_its_path_tells(path: Path, owner: Owner) -> None:
    assert Owners(Facts(Heap(parents=[-1]), tensors={0: 7}, paths={0: path})).of(0) == owner


@pytest.mark.parametrize(
    ("module", "above", "owner"),
    [
        ("torch.distributed.fsdp", 0, "communication buffer"),
        ("torch.distributed.fsdp", 7, "communication buffer"),
        ("torch.distributed.fsdp", 8, "variable"),
        ("torch.nn", 1, "variable"),
    ],
)
def test_what_torch_distributed_holds_is_a_buffer_of_it(module: str, above: int, owner: Owner) -> None:
    heap = Heap(parents=[-1, *range(above)])
    assert Owners(Facts(heap, tensors={above: 7}, modules={0: module})).of(above) == owner


def test_parameters_come_before_all_else_and_unknown_memory_last() -> None:
    assert PRIORITY[0] == "parameter" and PRIORITY[-1] == "c++ only"
    assert PRIORITY.index("gradient") < PRIORITY.index("saved for backward") < PRIORITY.index("variable")
