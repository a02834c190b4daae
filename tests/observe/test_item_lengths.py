"""Lengths of items are read from memory, and no code of a data set runs."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from memtriage.observe import item_lengths as module
from memtriage.observe.item_lengths import item_lengths

torch = pytest.importorskip("torch")

_LENGTHS = [3, 1, 4, 1, 5]


class Texts:
    """A data set whose own code must not run."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked for an item")

    def __len__(self) -> int:
        raise AssertionError("asked for its length")

    @property
    def lengths(self) -> Any:
        raise AssertionError("asked for a property")


def lengths(dataset: Any) -> list[int] | None:
    found = item_lengths(dataset)
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    "column",
    [_LENGTHS, tuple(_LENGTHS), array("l", _LENGTHS), np.array(_LENGTHS, np.int16), torch.tensor(_LENGTHS)],
)
@pytest.mark.parametrize("name", ["_lengths", "seq_lens", "num_tokens", "text_lengths", "sizes"])
def test_a_column_of_lengths_is_read(name: str, column: Any) -> None:
    assert lengths(Texts(**{name: column, "texts": ["a", "b"]})) == _LENGTHS


@pytest.mark.parametrize(
    "column",
    [
        [3, 1.5],
        [True, False],
        ["a", "b"],
        [],
        np.array([0.5, 1.5]),
        np.ones((2, 2), int),
        torch.ones(2, requires_grad=True),
        iter([1, 2]),
        None,
    ],
)
def test_what_is_no_column_of_whole_numbers_is_not_read(column: Any) -> None:
    assert lengths(Texts(seq_lens=column)) is None


def test_two_columns_give_the_longer_one_and_must_be_of_one_size() -> None:
    assert lengths(Texts(src_lens=[1, 5, 2], tgt_lens=[2, 3, 2])) == [2, 5, 2]
    assert lengths(Texts(src_lens=[1, 5, 2], tgt_lens=[2, 3])) is None


@pytest.mark.parametrize(
    "items",
    [
        [torch.zeros(length) for length in _LENGTHS],
        [np.zeros((length, 2)) for length in _LENGTHS],
        [list(range(length)) for length in _LENGTHS],
        [{"input_ids": [0] * length, "label": 1} for length in _LENGTHS],
        [(torch.zeros(length), 1) for length in _LENGTHS],
        [[torch.zeros(length), torch.zeros(1)] for length in _LENGTHS],
    ],
)
def test_items_in_memory_are_measured(items: list[Any]) -> None:
    assert lengths(items) == _LENGTHS
    assert lengths(Texts(items=items, classes=["a", "b"], labels=[0, 1])) == _LENGTHS


@pytest.mark.parametrize(
    "items", [["ab", "c"], [torch.zeros(2), "c"], [torch.tensor(1), torch.tensor(2)], [(1, 2)], [{}, {}], 7]
)
def test_items_without_a_length_are_not_measured(items: Any) -> None:
    assert lengths(items) is None


def test_a_subset_has_the_lengths_of_its_items() -> None:
    subset = torch.utils.data.Subset
    assert lengths(subset(Texts(seq_lens=_LENGTHS), [4, 0])) == [5, 3]
    assert lengths(subset(subset(Texts(seq_lens=_LENGTHS), [4, 2, 0]), torch.tensor([1]))) == [4]
    assert lengths(subset(Texts(seq_lens=_LENGTHS), [5])) is None
    assert lengths(subset(Texts(), [0])) is None


def test_nothing_is_read_of_an_object_without_attributes() -> None:
    assert lengths(range(5)) is None
    assert lengths(object()) is None


def test_of_a_gigantic_data_set_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ITEMS", 4)
    monkeypatch.setattr(module, "MOST_NUMBERS", 4)
    assert lengths([torch.zeros(length) for length in _LENGTHS]) is None
    assert lengths(Texts(seq_lens=_LENGTHS)) is None
    assert lengths(Texts(seq_lens=np.array(_LENGTHS))) is None
    assert lengths(arrow(Table(), None)) is None


class Table:
    """A table of five rows that cannot be read."""

    column_names = ("length",)

    def __len__(self) -> int:
        return 5


def arrow(table: Any, chosen: Any) -> Any:
    """Stands for a `datasets.Dataset`, as far as its attributes are read."""
    kind = type("Dataset", (Texts,), {"__module__": "datasets.arrow_dataset"})
    return kind(_data=table, _indices=chosen)


def test_an_arrow_table_gives_its_column_or_the_lengths_of_its_lists() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    lists = pyarrow.chunked_array([[[0] * length for length in part] for part in ([3, 1], [4, 1, 5])])
    tokens = pyarrow.table({"input_ids": lists, "text": list("abcde")})
    assert lengths(arrow(tokens, None)) == _LENGTHS
    assert lengths(arrow(tokens.slice(1, 3), None)) == [1, 4, 1]
    assert lengths(arrow(tokens, pyarrow.table({"indices": [4, 0, 0]}))) == [5, 3, 3]
    assert lengths(arrow(tokens, pyarrow.table({"indices": [7]}))) is None
    assert lengths(arrow(pyarrow.table({"length": [2, 9], "input_ids": [[1], [1]]}), None)) == [2, 9]
    assert lengths(arrow(pyarrow.table({"length": [2, None]}), None)) is None
    assert lengths(arrow(pyarrow.table({"input_ids": ["ab", "c"]}), None)) is None
    assert lengths(arrow(pyarrow.table({"text": ["ab", "c"]}), None)) is None
    assert lengths(arrow(tokens.slice(0, 0), None)) is None
    assert lengths(arrow(None, None)) is None
