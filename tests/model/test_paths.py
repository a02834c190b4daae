"""Holder paths in words, and what is asked of them."""

from __future__ import annotations

import pytest

from memtriage.model.paths import (
    ANY_ITEM,
    HolderPath,
    PathSegment,
    SegmentKind,
    anchor_of,
    has,
    in_words,
    is_native,
    last_name,
    without_last_item,
)
from support.paths import attribute, graph, item, items_of, local, named, of_module


def segment(kind: str, name: str = "") -> PathSegment:
    return PathSegment(SegmentKind(kind), name)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ((), ""),
        (of_module("train", "losses"), "train.losses"),
        ((*of_module("train", "losses"), item("'lm'"), ANY_ITEM), "train.losses['lm'][*]"),
        (items_of("evaluate", "acts"), "frame evaluate(): acts[*]"),
        ((segment("thread", "loader"), *local("run", "x")), 'thread "loader" frame run(): x'),
        ((segment("generator", "batches"), *named("x")), "generator batches(): x"),
        ((segment("known", "rope table"), *of_module("m", "x")), "rope table: m.x"),
        ((segment("known", "rope table"), *attribute("cache")), "rope table: .cache"),
        (attribute("model", "weight"), "model.weight"),
        ((*named("x"), *graph("MulBackward0", "self")), "x -> grad_fn MulBackward0 -> saved self"),
        ((*named("x"), segment("grad_fn"), segment("saved")), "x -> grad_fn -> saved"),
        ((*named("x"), segment("grad_fn", "F"), segment("context", "acts")), "x -> grad_fn F -> ctx.acts"),
        ((*named("x"), segment("grad_fn", "F"), segment("context")), "x -> grad_fn F -> ctx"),
        (
            (*named("f"), segment("hook_closure", "grab"), *named("captured"), ANY_ITEM),
            "f -> closure of hook grab: captured[*]",
        ),
        ((segment("native"), segment("grad_fn", "F")), "C++ -> grad_fn F"),
        ((segment("native", "Reducer"),), "C++ -> Reducer"),
        ((segment("unseen", "dict"), item("'k'")), "C++ or an evaluation stack -> dict['k']"),
    ],
)
def test_paths_in_words(path: HolderPath, words: str) -> None:
    assert in_words(path) == words


@pytest.mark.parametrize("kind", ["grad_fn", "later_node", "saved", "context", "leaf", "node_hooks"])
def test_the_anchor_ends_before_the_first_hop_into_the_graph(kind: str) -> None:
    assert anchor_of((*items_of("f", "x"), segment(kind, "a"), *graph("B", "self"))) == items_of("f", "x")
    assert anchor_of(items_of("f", "x")) == items_of("f", "x")
    assert anchor_of(graph("B", "self")) == ()


def test_segments_are_found_by_kind() -> None:
    path = items_of("f", "x")
    assert has(path, SegmentKind.ITEM) and has(path, SegmentKind.SAVED, SegmentKind.FRAME)
    assert not has(path, SegmentKind.SAVED, SegmentKind.MODULE) and not has((), SegmentKind.ITEM)


def test_a_path_that_begins_in_native_code() -> None:
    assert is_native((segment("native"), segment("grad_fn"))) and is_native((segment("unseen", "dict"),))
    assert not is_native((*named("x"), segment("native", "Reducer")))


@pytest.mark.parametrize("varying", ["*", "'layer.*'", "'*.weight'"])
def test_the_container_of_items_that_vary(varying: str) -> None:
    assert without_last_item((*local("f", "x"), item(varying))) == local("f", "x")


def test_one_item_is_no_container() -> None:
    one = (*local("f", "x"), item("'lm'"))
    assert without_last_item(one) == one
    assert without_last_item(local("f", "*x")) == local("f", "*x")
    assert without_last_item(()) == ()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (of_module("train", "losses"), "losses"),
        ((*of_module("train", "losses"), ANY_ITEM), "losses[*]"),
        ((*of_module("train", "losses"), item("'lm'")), "lm"),
        ((*named("grads"), item("'0.weight'"), item("3")), "grads['0.weight'][3]"),
        ((*named("state"), item("'lm'"), item("0")), "lm[0]"),
        ((*named("model"), *attribute("fc", "cache")), "cache"),
        ((item("3"), item("4")), "[3][4]"),
    ],
)
def test_the_last_name_of_a_path(path: HolderPath, name: str) -> None:
    assert last_name(path) == name
