"""Holder paths: what the program wrote is what the report must say."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.path_rules import key_labels
from memtriage.model.paths import PathSegment, SegmentKind
from support.path_cases import PRELUDE, PYTHON


@pytest.fixture(scope="module")
def python_paths(gallery: Callable[..., Any]) -> Any:
    return gallery({case: source for case, (source, _) in PYTHON.items()}, PRELUDE)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("case", PYTHON)
def test_path_in_python(python_paths: Any, case: str) -> None:
    holder = PYTHON[case][1]
    assert python_paths.holders(case) == ({holder} if holder else set())


def test_chains_fold_to_one_or_two_rounds(program: Any) -> None:
    program.run(PRELUDE)
    program.run("head = None\nfor _ in range(60): head, head.next = Thing(T()), head", "objects")
    program.run("cell = None\nfor _ in range(60): cell = (T(), cell)", "tuples")
    program.run("nest = []\nfor _ in range(60): nest = [T(), nest]", "lists")
    program.look()
    assert program.holders("objects") == {"train.head.t", "train.head.next.t"}
    assert program.holders("tuples") == {"train.cell[0]", "train.cell[1][0]", "train.cell[1][1][0]"}
    assert program.holders("lists") == {"train.nest[*]", "train.nest[*][*]"}


def test_all_exceptions_of_a_chain_have_the_path_of_the_one_that_is_kept(program: Any) -> None:
    program.run(PRELUDE)
    program.run(
        """
        last = None
        def load():
            batch = T()
            raise ValueError from last
        for _ in range(5):
            try:
                load()
            except ValueError as error:
                last = error
        """
    )
    program.look()
    assert program.holders() == {"train.last.__traceback__ -> frame load(): batch"}


def test_frames_of_all_threads(program: Any) -> None:
    program.run(
        PRELUDE
        + """
ready, stop = threading.Event(), threading.Event()

def work():
    items = [made(torch.ones(100), "thread")]
    ready.set()
    stop.wait()

def evaluate():
    acts = [made(torch.ones(100), "local")]
    cell = made(torch.ones(100), "cell")
    def inner():
        made(cell, "cell")
        look()
    inner()
"""
    )
    loader = threading.Thread(target=program["work"], name="loader")
    loader.start()
    program["ready"].wait()
    program["evaluate"]()
    program["stop"].set()
    loader.join()
    assert program.holders("thread") == {'thread "loader" frame work(): items[*]'}
    assert program.holders("local") == {"frame evaluate(): acts[*]"}
    assert program.holders("cell") == {"frame inner(): cell"}


def test_garbage_and_what_only_cpp_holds(program: Any) -> None:
    program.run(
        PRELUDE
        + """
class Parent:
    def __init__(self):
        self.child = Child(self)
class Child:
    def __init__(self, parent):
        self.parent, self.data = parent, [made(torch.ones(100), "cycle")]

class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.big = made(torch.ones(100), "context")
        return x * 1
    @staticmethod
    def backward(ctx, g):
        return g

def through_cpp():
    out = Keeps.apply(torch.ones(10, requires_grad=True))
    out.grad_fn.later = out * 2

def create_graph():
    w = torch.ones(100, requires_grad=True)
    (w ** 3).sum().backward(create_graph=True)
    made(w.grad, "gradient")

gc.disable()
Parent()
through_cpp()
"""
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of this very cycle
        program["create_graph"]()
    program.look()
    program.run("gc.enable()\nfreed = gc.collect()")
    assert program.holders("cycle") == {"garbage cycle of Parent.child.data[*]"}
    assert program.holders("context") == {"C++ -> grad_fn KeepsBackward -> ctx.big"}
    assert program.holders("gradient") == {"C++ -> Tensor.grad"}
    program.look()
    assert program.holders("cycle") == set()  # a collection frees what was called garbage, and no more
    assert program.holders("context") == {"C++ -> grad_fn KeepsBackward -> ctx.big"}


def test_a_gradient_goes_with_its_tensor(program: Any) -> None:
    program.run(
        PRELUDE
        + """
class Fold:
    def __init__(self):
        self.weight = torch.ones(100, requires_grad=True)
        self.weight.sum().backward()
        self.me = self
        made(self.weight.grad, "gradient")

gc.disable()
Fold()
"""
    )
    program.look()
    program.run("gc.enable()\nfreed = gc.collect()")
    assert program.holders("gradient") == {"garbage cycle of Fold.weight.grad"}
    program.look()
    assert program.holders("gradient") == set()


@given(
    st.dictionaries(
        st.one_of(st.integers(), st.text(max_size=6), st.tuples(st.integers())), st.builds(object)
    ),
    st.booleans(),
)
def test_every_value_of_a_dict_has_a_segment(holder: dict[Any, object], namespace: bool) -> None:
    labels = key_labels(
        [(key if isinstance(key, str) else None, id(value)) for key, value in holder.items()], namespace
    )
    assert set(labels) == {id(value) for value in holder.values()}
    kinds = {SegmentKind.ITEM, SegmentKind.ATTRIBUTE, SegmentKind.HOOKS}
    assert {segment.kind for segment in labels.values()} <= kinds
    assert len(set(labels.values())) <= 33 or namespace


@given(st.integers(3, 400))
def test_numbered_keys_share_one_segment(count: int) -> None:
    keys = [(f"layer_{number}", number) for number in range(count)]
    assert set(key_labels(keys, False).values()) == {PathSegment(SegmentKind.ITEM, "'layer_*'")}
