"""The batch in work, read off the variables of the functions that train."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from memtriage.observe.inputs import (
    batch_elements,
    batch_shapes,
    caller_frames,
    running_functions,
    traceback_frames,
)


def elements(**variables: Any) -> int | None:
    """What is seen of a function with these variables."""
    return _inside(variables, lambda frame: batch_elements(iter([frame])))


def shapes(**variables: Any) -> dict[str, int]:
    return _inside(variables, lambda frame: batch_shapes([frame]))


def _inside(variables: dict[str, Any], look: Callable[[FrameType], Any]) -> Any:
    lines = [f"    {name} = given[{name!r}]" for name in variables]
    source = "\n".join(["def train(given, look, here):", *lines, "    return look(here())"])
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["train"](variables, look, lambda: sys._getframe(1))


@pytest.mark.parametrize(
    "name", ["x", "inputs", "input_ids", "batch", "microbatch", "images", "src", "pixel_values"]
)
def test_usual_names(name: str) -> None:
    assert elements(**{name: torch.ones(3, 5)}) == 15


@pytest.mark.parametrize("name", ["weights", "x1", "my_batch", "hidden", "loss"])
def test_other_names_are_no_batch(name: str) -> None:
    assert elements(**{name: torch.ones(3, 5)}) is None


def test_the_largest_counts() -> None:
    assert elements(x=torch.ones(2), labels=torch.ones(3, 3), weights=torch.ones(100)) == 9


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(4, 4), "n": 3},
        [torch.ones(4, 4), "text"],
        (torch.ones(2), torch.ones(16)),
    ],
)
def test_one_level_inside_a_batch(batch: Any) -> None:
    assert elements(batch=batch) == 16


def test_a_tokenizers_batch() -> None:
    BatchEncoding = type("BatchEncoding", (), {"data": {"input_ids": torch.ones(4, 4)}})
    assert elements(batch=BatchEncoding()) == 16


def test_what_gradients_flow_through_is_no_input() -> None:
    leaf = torch.ones(9, requires_grad=True)
    assert elements(x=leaf, y=leaf * 2) is None
    assert elements(x=leaf.detach()) == 9


def test_module_level_loops() -> None:
    namespace = {"batch": torch.ones(7), "unrelated": torch.ones(70), "sys": sys, "frames": []}
    exec("frames.append(sys._getframe())", namespace)
    assert batch_elements(iter(namespace["frames"])) == 7


def test_nothing_seen() -> None:
    assert elements(x=None, batch="text", data=3) is None
    assert batch_elements(iter([])) is None


def test_no_batch_is_seen_while_another_module_replaces_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3)
    monkeypatch.setitem(sys.modules, "torch", object())
    assert elements(x=x) is None
    assert shapes(x=x) == {}


def test_shapes_of_batch_and_model() -> None:
    config = SimpleNamespace(vocab_size=50257, n_embd=768, n_head=12, hidden_size="unset")
    model = SimpleNamespace(config=config)
    known = {"vocabulary": 50257, "hidden": 768, "heads": 12}
    tokens = {"input_ids": torch.ones(8, 1024), "mask": torch.ones(8)}
    assert shapes(batch=tokens, model=model) == {"batch": 8, "sequence": 1024, **known}
    assert shapes(config=config) == known
    assert shapes(x=torch.ones(3), model=SimpleNamespace()) == {}


def test_shapes_are_of_the_inner_model_and_the_largest_batch() -> None:
    inner = shapes(x=torch.ones(2, 3, 4), labels=torch.ones(2, 100))
    assert inner == {"batch": 2, "sequence": 100}


def frame_names(skip: int) -> list[str]:
    frames = list(caller_frames(skip))
    return [frame.f_code.co_name for frame in frames]


def test_caller_frames_start_where_asked() -> None:
    def outer(skip: int) -> list[str]:
        return frame_names(skip)

    assert outer(0)[:3] == ["frame_names", "outer", "test_caller_frames_start_where_asked"]
    assert outer(2)[0] == "test_caller_frames_start_where_asked"
    assert len(outer(0)) <= 12


def test_the_batch_is_found_from_deep_within_a_model() -> None:
    def nested(levels: int, depth: int | None) -> int | None:
        if levels:
            return nested(levels - 1, depth)
        return batch_elements(caller_frames(0, depth=depth))

    def forward(input_ids: torch.Tensor, depth: int | None) -> int | None:
        return nested(40, depth)

    assert forward(torch.ones(4, 7), None) == 28
    assert forward(torch.ones(4, 7), 12) is None


def test_frames_of_torch_are_left_out() -> None:
    seen: list[str] = []

    class Look(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(frame_names(0))
            return x

    Look()(torch.ones(1))
    assert seen[:3] == ["frame_names", "forward", "test_frames_of_torch_are_left_out"]


def test_running_functions_name_file_function_and_line() -> None:
    line = sys._getframe().f_lineno + 1
    functions = running_functions()
    assert functions[0] == (__file__, "test_running_functions_name_file_function_and_line", line)
    assert len(functions) > 3


def test_traceback_frames_are_innermost_first() -> None:
    def failing() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        failing()
    names = [frame.f_code.co_name for frame in traceback_frames(caught.value.__traceback__)]
    assert names == ["failing", "test_traceback_frames_are_innermost_first"]
    assert traceback_frames(None) == []


def test_shapes_are_known_of_an_input_of_one_element() -> None:
    assert shapes(x=torch.ones(1, 1)) == {"batch": 1, "sequence": 1}
