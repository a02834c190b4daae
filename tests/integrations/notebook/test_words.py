"""Paths of the census under a notebook's names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.integrations.notebook.words import census_in_words, finding_in_words, in_words
from memtriage.model.census import Census, HolderGroup, StorageRecord
from memtriage.model.findings import Finding

SHELL = "__main__.get_ipython.__self__"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("__main__.kept[*]", "kept[*]"),
        ("__main__.model.fc.weight", "model.fc.weight"),
        ("__main__._", "Out[*]"),
        ("__main__.___[*].weight", "Out[*][*].weight"),
        ("__main__._17 -> grad_fn MulBackward0", "Out[*] -> grad_fn MulBackward0"),
        ("__main__._*", "Out[*]"),
        ("__main__._oh[*].weight", "Out[*].weight"),
        ("__main__.Out[*]", "Out[*]"),
        (f"{SHELL}.displayhook.__", "Out[*]"),
        (f"{SHELL}.user_ns_hidden['_']", "Out[*]"),
        (f"{SHELL}.user_ns_hidden['_7'].weight", "Out[*].weight"),
        ("__main__._private", "_private"),
        ("__main__._7b", "_7b"),
        ("__main__.__x", "__x"),
        (f"{SHELL}.InteractiveTB.tb -> frame f(): x", "last traceback -> frame f(): x"),
        ("sys.last_exc.__traceback__ -> frame f(): x", "last traceback -> frame f(): x"),
        ("sys.last_traceback -> frame f(): x", "last traceback -> frame f(): x"),
        ("frame train(): batch", "frame train(): batch"),
        ("other__main__.x", "other__main__.x"),
        ("__main__.a keeps what __main__.b[*] has", "a keeps what b[*] has"),
    ],
)
def test_words(path: str, words: str) -> None:
    assert in_words(path) == words


PATHS = st.sampled_from(
    ["__main__.x", "__main__._", "__main__._7", "__main__.Out[*]", "frame f(): x", "torch.y[*]"]
)
GROUPS = st.lists(
    st.tuples(st.sampled_from(["cpu", "cuda:0"]), PATHS, st.integers(1, 1 << 40), st.integers(1, 9)),
    unique_by=lambda one: one[:2],
)


@given(GROUPS)
def test_no_byte_is_lost_and_no_name_twice(drawn: list[tuple[str, str, int, int]]) -> None:
    groups = [
        HolderGroup(
            device=device, anchor=path, holder=path, count=count, nbytes=nbytes, tails={path: nbytes},
            owners={"variable": nbytes}, attached=False,
        )
        for device, path, nbytes, count in drawn
    ]  # fmt: skip
    census = Census(storages=[], groups=groups, nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0)
    renamed = census_in_words(census).groups
    assert sum(group.nbytes for group in renamed) == sum(group.nbytes for group in groups)
    assert sum(group.count for group in renamed) == sum(group.count for group in groups)
    assert all(sum(group.tails.values()) == group.nbytes for group in renamed)
    assert len({(group.device, group.anchor) for group in renamed}) == len(renamed)
    assert [group.nbytes for group in renamed] == sorted((g.nbytes for g in renamed), reverse=True)


def test_storages_are_renamed_too() -> None:
    record = StorageRecord(device="cpu", address=1, nbytes=4, owner="variable", holder="__main__._3")
    census = Census(storages=[record], groups=[], nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0)
    assert census_in_words(census).storages[0].holder == "Out[*]"


def test_lines_of_cells_go_by_the_cells_number() -> None:
    finding = Finding(
        kind="leak", device="cpu", holder="__main__.kept[*]", allocated_at="481592.py:7 in train",
        mechanism="__main__.kept grows",
        evidence=["made at <ipython-input-3-ab12>:2", "at util.py:9", "at ipykernel_7/481592.py:1"],
    )  # fmt: skip
    cells = {"481592.py": "In[4]", "<ipython-input-3-ab12>": "In[3]"}
    told = finding_in_words(finding, cells.get)
    assert told.allocated_at == "In[4]:7 in train"
    assert told.evidence == ["made at In[3]:2", "at util.py:9", "at In[4]:1"]
    assert (told.holder, told.mechanism) == ("kept[*]", "kept grows")
    assert finding.holder == "__main__.kept[*]"
