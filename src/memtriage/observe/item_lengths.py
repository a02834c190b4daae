"""Read the lengths of a data set's items from what is already in memory.

No code of the program runs: no `__getitem__`, `__len__` or property of a data set. Columns of lengths, lists
of items that are tensors or lists, and Arrow tables can be read.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from memtriage.observe.classes import exactly, instance_dict, module_of
from memtriage.observe.tensors import undisturbed

Integers = np.ndarray[Any, np.dtype[np.int64]]

MOST_ITEMS: Final = 100_000
"""Most items that are read one by one: 0.1 us to 0.5 us each."""
MOST_NUMBERS: Final = 2_000_000
"""Most numbers that are read from a list or column: up to 0.1 us each."""
_LENGTHS: Final = re.compile(
    r"_?((seq|sequence|sample|item|token|text|src|tgt|source|target|audio)_?)?(lengths?|lens?|sizes)"
    r"|_?(num|n)_?tokens|length_(column|list)",
    re.IGNORECASE,
)
_ARROW_LENGTHS: Final = ("length", "lengths", "num_tokens", "n_tokens")
_ARROW_ITEMS: Final = "input_ids"


def item_lengths(dataset: Any) -> Integers | None:
    """Return the length of each item of a data set; None if it cannot be read without side effects."""
    with undisturbed():
        return _lengths(dataset)


def _lengths(dataset: Any) -> Integers | None:
    if exactly(dataset, list, tuple):
        return _of_items(dataset)
    own = instance_dict(dataset)
    if own is None:
        return None
    data = sys.modules.get("torch.utils.data")
    if data is not None and type(dataset) is data.Subset:
        whole, chosen = _lengths(own["dataset"]), numbers(own["indices"])
        return None if whole is None or chosen is None else _chosen(whole, chosen)
    if module_of(type(dataset)).startswith("datasets."):
        return _of_arrow(own.get("_data"), own.get("_indices"))
    columns = [
        numbers(value) for name, value in own.items() if type(name) is str and _LENGTHS.fullmatch(name)
    ]
    known = [column for column in columns if column is not None]
    if not known:
        lists = [_of_items(value) for value in own.values() if exactly(value, list, tuple)]
        known = [lengths for lengths in lists if lengths is not None]
    if len({len(column) for column in known}) != 1:
        return None
    longest: Integers = np.maximum.reduce(known)
    return longest


def numbers(column: Any) -> Integers | None:
    """Return whole numbers as an array; None if a column is anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and type(column) is torch.Tensor and column.device.type == "cpu":
        column = column.detach().numpy()
    elif exactly(column, list, tuple):
        if not 0 < len(column) <= MOST_NUMBERS or any(type(each) is not int for each in column):
            return None
    elif not exactly(column, np.ndarray, array, range):
        return None
    if len(column) > MOST_NUMBERS:
        return None
    values = np.asarray(column)
    if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values):
        return None
    return values.astype(np.int64)


def _of_items(items: Sequence[Any]) -> Integers | None:
    """Return the lengths of items in memory; None if one has none, or there are too many."""
    if not 1 < len(items) <= MOST_ITEMS:
        return None
    lengths = np.empty(len(items), np.int64)
    for place, item in enumerate(items):
        length = _length(item)
        if length is None:
            return None
        lengths[place] = length
    return lengths


def _length(item: Any) -> int | None:
    """Return the length of the longest sequence in an item: a tensor, an array, a list, or some of these."""
    if type(item) is dict:
        return _longest(item.values())
    if not exactly(item, list, tuple) or not item:
        return _rows(item)
    return len(item) if exactly(item[0], int, float) else _longest(item)


def _longest(parts: Iterable[Any]) -> int | None:
    known = [length for part in parts if (length := _rows(part)) is not None]
    return max(known, default=None)


def _rows(part: Any) -> int | None:
    if type(part) is list:
        return len(part)
    torch = sys.modules.get("torch")
    if type(part) is np.ndarray or (torch is not None and type(part) is torch.Tensor):
        return int(part.shape[0]) if part.ndim else None
    return None


def _of_arrow(table: Any, chosen: Any) -> Integers | None:
    """Return the lengths of a `datasets.Dataset` from its Arrow table, without formats and transforms."""
    names = getattr(table, "column_names", ())
    if len(table if table is not None else ()) > MOST_NUMBERS:
        return None
    name = next((each for each in (*_ARROW_LENGTHS, _ARROW_ITEMS) if each in names), None)
    if name is None:
        return None
    chunks = [chunk for chunk in table.column(name).chunks if len(chunk)]
    if name == _ARROW_ITEMS:
        if any(not hasattr(chunk, "offsets") for chunk in chunks):
            return None
        parts = [np.diff(chunk.offsets.to_numpy()) for chunk in chunks]
    else:
        parts = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]
    lengths = numbers(np.concatenate(parts)) if parts else None
    if lengths is None or chosen is None:
        return lengths
    order = numbers(np.concatenate([chunk.to_numpy() for chunk in chosen.column(0).chunks]))
    return None if order is None else _chosen(lengths, order)


def _chosen(lengths: Integers, order: Integers) -> Integers | None:
    if order.min() < 0 or order.max() >= len(lengths):
        return None
    return lengths[order]
