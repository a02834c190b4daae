"""Folding and naming of holder paths, without any object."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.path_rules import (
    attribute_segment,
    extend,
    item_segment,
    key_labels,
    telling_name,
)
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind

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
