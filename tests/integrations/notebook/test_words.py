"""Paths of the census under a notebook's names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.integrations.notebook.words import cell_path, census_in_words, finding_in_words
from memtriage.model.census import Census, HolderGroup, StorageRecord
from memtriage.model.findings import Finding
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind, in_words
from support.paths import local, of_module

SHELL = (*of_module("__main__", "get_ipython"), PathSegment(SegmentKind.ATTRIBUTE, "__self__"))
FRAME = local("f", "x")
WEIGHT = PathSegment(SegmentKind.ATTRIBUTE, "weight")


def shell(*attributes: str) -> HolderPath:
    return *SHELL, *(PathSegment(SegmentKind.ATTRIBUTE, name) for name in attributes)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ((*of_module("__main__", "kept"), ANY_ITEM), "kept[*]"),
        ((*of_module("__main__", "model"), WEIGHT), "model.weight"),
        (of_module("__main__", "_"), "Out[*]"),
        ((*of_module("__main__", "___"), ANY_ITEM, WEIGHT), "Out[*][*].weight"),
        (
            (*of_module("__main__", "_17"), PathSegment(SegmentKind.GRAD_FN, "MulBackward0")),
            "Out[*] -> grad_fn MulBackward0",
        ),
        (of_module("__main__", "_*"), "Out[*]"),
        ((*of_module("__main__", "_oh"), ANY_ITEM, WEIGHT), "Out[*].weight"),
        ((*of_module("__main__", "Out"), ANY_ITEM), "Out[*]"),
        (shell("displayhook", "__"), "Out[*]"),
        ((*shell("user_ns_hidden"), PathSegment(SegmentKind.ITEM, "'_'")), "Out[*]"),
        ((*shell("user_ns_hidden"), PathSegment(SegmentKind.ITEM, "'_7'"), WEIGHT), "Out[*].weight"),
        (of_module("__main__", "_private"), "_private"),
        (of_module("__main__", "_7b"), "_7b"),
        (of_module("__main__", "__x"), "__x"),
        ((*shell("InteractiveTB", "tb"), *FRAME), "last traceback -> frame f(): x"),
        (
            (*of_module("sys", "last_exc"), PathSegment(SegmentKind.TRACEBACK, "__traceback__"), *FRAME),
            "last traceback -> frame f(): x",
        ),
        ((*of_module("sys", "last_traceback"), *FRAME), "last traceback -> frame f(): x"),
        (local("train", "batch"), "frame train(): batch"),
        (of_module("other__main__", "x"), "other__main__.x"),
    ],
)
def test_paths_have_a_notebook_s_names(path: HolderPath, words: str) -> None:
    assert in_words(cell_path(path)) == words


PATHS = st.sampled_from(
    [
        of_module("__main__", "x"),
        of_module("__main__", "_"),
        of_module("__main__", "_7"),
        (*of_module("__main__", "Out"), ANY_ITEM),
        FRAME,
        (*of_module("torch", "y"), ANY_ITEM),
    ]
)
GROUPS = st.lists(
    st.tuples(st.sampled_from(["cpu", "cuda:0"]), PATHS, st.integers(1, 1 << 40), st.integers(1, 9)),
    unique_by=lambda one: one[:2],
)


@given(GROUPS)
def test_no_byte_is_lost_and_no_name_twice(drawn: list[tuple[str, HolderPath, int, int]]) -> None:
    groups = [
        HolderGroup(
            device=device, anchor=path, path=path, count=count, nbytes=nbytes, by_path={path: nbytes},
            owners={"variable": nbytes}, attached=False,
        )
        for device, path, nbytes, count in drawn
    ]  # fmt: skip
    census = Census(storages=[], groups=groups, objects=0, nodes=0, seconds=0.0)
    renamed = census_in_words(census).groups
    assert sum(group.nbytes for group in renamed) == sum(group.nbytes for group in groups)
    assert sum(group.count for group in renamed) == sum(group.count for group in groups)
    assert all(sum(group.by_path.values()) == group.nbytes for group in renamed)
    assert len({group.key for group in renamed}) == len(renamed)
    assert [group.nbytes for group in renamed] == sorted((g.nbytes for g in renamed), reverse=True)


def test_storages_are_renamed_too() -> None:
    record = StorageRecord(
        device="cpu", address=1, nbytes=4, owner="variable", path=of_module("__main__", "_3")
    )
    census = Census(storages=[record], groups=[], objects=0, nodes=0, seconds=0.0)
    assert census_in_words(census).storages[0].holder == "Out[*]"


def test_lines_of_cells_go_by_the_cells_number() -> None:
    finding = Finding(
        kind="leak", device="cpu", holder_path=(*of_module("__main__", "kept"), ANY_ITEM),
        allocated_at="481592.py:7 in train",
        mechanism="__main__.kept grows", also_held_by_paths=[of_module("__main__", "_3")],
        evidence=["made at <ipython-input-3-ab12>:2", "at util.py:9", "at ipykernel_7/481592.py:1"],
    )  # fmt: skip
    cells = {"481592.py": "In[4]", "<ipython-input-3-ab12>": "In[3]"}
    told = finding_in_words(finding, cells.get)
    assert told.allocated_at == "In[4]:7 in train"
    assert told.evidence == ["made at In[3]:2", "at util.py:9", "at In[4]:1"]
    assert (told.holder, told.mechanism) == ("kept[*]", "kept grows")
    assert told.also_held_by == ["Out[*]"]
    assert finding.holder == "__main__.kept[*]"


def test_sentences_use_the_notebooks_name_of_the_holder() -> None:
    finding = Finding(
        kind="leak", device="cpu", holder_path=of_module("__main__", "_7"),
        mechanism="__main__._7 keeps what __main__._7b has", fix="clear __main__.other",
    )  # fmt: skip
    told = finding_in_words(finding, lambda name: None)
    assert (told.mechanism, told.fix) == ("Out[*] keeps what _7b has", "clear other")
