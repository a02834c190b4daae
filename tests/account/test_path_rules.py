"""Folding and naming of holder paths, without any object."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.path_rules import (
    FoldedPaths,
    Path,
    attribute_segment,
    extend,
    item_segment,
    key_labels,
    root_path,
    telling_name,
)
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind, in_words

HOPS: list[HolderPath] = [
    (PathSegment(SegmentKind.ATTRIBUTE, "next"),),
    (ANY_ITEM,),
    (PathSegment(SegmentKind.CLOSURE, "f"), PathSegment(SegmentKind.VARIABLE, "cell")),
    (PathSegment(SegmentKind.ATTRIBUTE, "t"),),
]
ROOT: HolderPath = (PathSegment(SegmentKind.MODULE, "train"),)


@given(st.lists(st.sampled_from(HOPS), max_size=200))
def test_folding_keeps_paths_short(hops: list[HolderPath]) -> None:
    path: tuple[HolderPath, ...] = (ROOT,)
    for hop in hops:
        path = extend(path, hop)
        assert path[0] == ROOT
        assert path[-1] == hop
        # Two of each named hop, and two items around each of them.
        assert len(path) <= 1 + 2 * 3 + 2 * (2 * 3 + 1)


def test_items_of_several_containers_on_the_way_are_no_chain() -> None:
    names = [(PathSegment(SegmentKind.ATTRIBUTE, name),) for name in ("players", "layers", "outputs")]
    hops = [hop for name in names for hop in (name, (ANY_ITEM,))]
    path: tuple[HolderPath, ...] = (ROOT,)
    for hop in [*hops, (ANY_ITEM,), (ANY_ITEM,)]:
        path = extend(path, hop)
    assert path == (ROOT, *hops, (ANY_ITEM,))


@given(st.lists(st.sampled_from(HOPS), unique=True))
def test_folding_leaves_short_chains_alone(hops: list[HolderPath]) -> None:
    path: tuple[HolderPath, ...] = ()
    for hop in hops:
        path = extend(path, hop)
    assert path == tuple(hops)


def labels_of(texts: Sequence[str | None], namespace: bool = False) -> list[PathSegment]:
    labels = key_labels([(text, at) for at, text in enumerate(texts)], namespace)
    return [labels[at] for at in range(len(texts))]


def test_two_numbered_keys_are_a_pair_and_three_fold():
    assert labels_of(["w1", "w2"]) == [item_segment("'w1'"), item_segment("'w2'")]
    assert labels_of(["w1", "w2", "w3", "bias"]) == [item_segment("'w*'")] * 3 + [item_segment("'bias'")]


@pytest.mark.parametrize(
    ("texts", "label"),
    [
        pytest.param(
            ["0ead1cbc-1dbd-4e0d-a8c5-40f9e8f8f4ce", "A0B61E69-F2A3-45AC-BCDE-AFEBD8C1DDEF"],
            ANY_ITEM,
            id="UUIDs",
        ),
        pytest.param(["9f86d081884c7d65", "fedcba4bcdef"], ANY_ITEM, id="hashes"),
        pytest.param(["session-2c26b46b", "session-fcde2b2e"], item_segment("'session-*'"), id="in a name"),
    ],
)
def test_hexadecimal_numbers_fold(texts: list[str], label: PathSegment) -> None:
    third = texts[0].replace("1", "7").replace("2", "5")
    words = [item_segment("'facade'"), item_segment("'deadbeef'")]
    assert labels_of([*texts, third, "facade", "deadbeef"]) == [label] * 3 + words
    assert labels_of(texts) == [item_segment(repr(text)) for text in texts]


def test_numbered_variables_fold_from_eight_on():
    seven, eight = [f"layer{at}" for at in range(7)], [f"layer{at}" for at in range(8)]
    assert labels_of(seven, namespace=True) == [attribute_segment(name) for name in seven]
    assert set(labels_of(eight, namespace=True)) == {attribute_segment("layer*")}


def test_keys_that_are_nothing_but_a_number_are_places():
    assert labels_of(["0"], namespace=True) == [ANY_ITEM]
    assert labels_of(["0", "1"]) == [item_segment("'0'"), item_segment("'1'")]
    assert labels_of(["0", "1", "2"]) == [ANY_ITEM] * 3
    assert labels_of([None, "a"]) == [ANY_ITEM, item_segment("'a'")]


def test_a_text_is_no_name():
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert labels_of([name, f"please summarize: {name} {name}"]) == [item_segment(repr(name)), ANY_ITEM]


def test_the_first_key_of_a_value_names_it():
    assert key_labels([("a", 7), ("b", 7)], False) == {7: item_segment("'a'")}


def test_a_cycle_has_the_name_of_its_first_own_class():
    dict_, list_ = ("builtins", "dict", False), ("collections", "deque", False)
    tensor, own = ("torch", "Tensor", True), ("train", "Parent", False)
    assert telling_name([dict_, tensor, list_, own, ("train", "Child", False)], "dict") == "Parent"
    assert telling_name([dict_, tensor, list_], "dict") == "Tensor"
    assert telling_name([dict_, list_], "dict") == "dict"


MODULE = 1
"""Position of the object that counts as an `nn.Module`."""


class Rules(FoldedPaths):
    """Names objects by what a test says: a chain of hops, one for each position."""

    def __init__(self, *steps: object) -> None:
        super().__init__([at - 1 for at in range(len(steps) + 1)])
        self.steps = steps

    def _root(self, position: int) -> Path:
        return root_path(PathSegment(SegmentKind.MODULE, "train"), namespace=True)

    def _from(self, parent: int, position: int) -> Path:
        step, before = self.steps[parent], self._known[parent]
        if isinstance(step, str):
            return self._entry(before, parent, attribute_segment(step))
        return step(self, before)  # type: ignore[operator]

    def _is_module(self, position: int) -> bool:
        return position == MODULE

    def words(self) -> str:
        return in_words(self.path(len(self.steps)).whole)


def test_the_parts_of_a_module_are_named_as_its_attributes():
    def namespace(rules: Rules, before: Path) -> Path:
        return rules._add(before, namespace=True)

    assert Rules("model", namespace, "_parameters", "weight").words() == "train.model.weight"
    assert Rules("model", namespace, "_parameter", "weight").words() == "train.model._parameter.weight"


def closure(rules: Rules, before: Path) -> Path:
    return rules._closure(before, "f")


def defaults(rules: Rules, before: Path) -> Path:
    return rules._defaults(before, "f", by_keyword=False)


def keyword_defaults(rules: Rules, before: Path) -> Path:
    return rules._defaults(before, "f", by_keyword=True)


def variable(rules: Rules, before: Path) -> Path:
    assert rules._is_of_function(before)
    return rules._variable_of_function(before, "x")


def into_graph(rules: Rules, before: Path) -> Path:
    return rules._into_graph(before, "AddBackward0")


def along_graph(rules: Rules, before: Path) -> Path:
    return rules._along_graph(before, "MulBackward0")


def context_dict(rules: Rules, before: Path) -> Path:
    return rules._context_dict(before)


def in_record(at: int | None, size: int) -> Callable[[Rules, Path], Path]:
    return lambda rules, before: rules._place(before, at, size)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (("loss",), "train.loss"),
        (("f", closure, variable), "train.f -> closure of f: x"),
        (("hook", closure, variable), "train.hook -> closure of hook f: x"),
        (("f", defaults, variable), "train.f -> default argument of f: x"),
        (("f", keyword_defaults, "scale"), "train.f -> default argument of f: scale"),
        (
            ("loss", into_graph, along_graph, along_graph),
            "train.loss -> grad_fn AddBackward0 -> … -> MulBackward0",
        ),
        (("loss", into_graph, context_dict, "kept"), "train.loss -> grad_fn AddBackward0 -> ctx.kept"),
        (("pair", in_record(1, 8)), "train.pair[1]"),
        (("pair", in_record(1, 9)), "train.pair[*]"),
        (("pair", in_record(None, 2)), "train.pair[*]"),
    ],
)
def test_hops_in_words(steps: tuple[object, ...], words: str) -> None:
    assert Rules(*steps).words() == words


def test_the_anchor_ends_before_the_graph_and_stays_there():
    rules = Rules("loss", into_graph, along_graph, along_graph, context_dict, "kept")
    assert [rules.path(at).outside for at in range(7)] == [1, 2, 2, 2, 2, 2, 2]
    assert [rules.path(at).attached for at in range(7)] == [False, False, True, True, True, True, True]
    assert [rules.path(at).in_graph for at in range(7)] == [False, False, True, True, True, True, False]
    assert in_words(rules.path(6).anchor) == "train.loss"


def test_the_list_of_a_context_is_a_record_and_no_other_list():
    rules = Rules("loss", into_graph, context_dict, "kept")
    assert [rules._is_of_context(rules.path(at)) for at in range(5)] == [False, False, False, False, True]


def test_a_cache_has_items_where_it_is_no_dict():
    rules = Rules()
    assert in_words(rules._cached("load", is_own_dict=True).whole) == "functools.lru_cache load"
    bounded = rules._cached("load", is_own_dict=False)
    assert bounded.outside == 2
    assert in_words(bounded.whole) == "functools.lru_cache load[*]"
    assert rules._cache_element(bounded) is bounded
    assert in_words(rules._cache_element(root_path(item_segment("0"))).whole) == "[0][*]"


def test_a_node_that_nothing_of_python_holds() -> None:
    alone = Rules()._graph_root("AddBackward0")
    assert in_words(alone.whole) == "C++ -> grad_fn AddBackward0"
    assert (alone.outside, alone.attached, alone.in_graph) == (1, True, True)


def test_names_of_a_module_are_its_variables_and_other_keys_are_items() -> None:
    rules = Rules()
    module = rules.path(0)
    assert rules._entry(module, 0, attribute_segment("loss")).last.kind is SegmentKind.VARIABLE
    assert rules._entry(module, 0, item_segment("'loss'")).last.kind is SegmentKind.ITEM


def test_only_a_module_hides_where_it_keeps_its_parts() -> None:
    rules = Rules("model", "other")
    before = rules.path(1)
    assert rules._attribute(before, MODULE, "_parameters") == rules._add(before, namespace=True)
    assert in_words(rules._attribute(before, MODULE, "weight").whole) == "train.model.weight"
    assert in_words(rules._attribute(before, MODULE + 1, "_parameters").whole) == "train.model._parameters"
