"""The rules that name and fold holder paths, for objects of this process and of others.

`memtriage.model.paths` says what segments are. A hop from one object to the next adds one to three of them: a
function's closure and the variable in it are one hop.

Folding keeps the number of different paths small: positions in lists and varying keys become `*`, only the
first and the last node of a walk along the graph are kept, and hops that repeat (linked lists, chains of
contexts) are cut to two rounds.
"""

from __future__ import annotations

import functools
import re
import types
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind

CONTAINERS: Final = (dict, list, tuple, deque, set, frozenset)
GENERATORS: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_MOST_IN_RECORD = 8
"""A tuple, or a list of an autograd context, of at most this many items is a record: places have meaning."""
CYCLE_SEARCHED: Final = 200
"""Objects of a garbage cycle that are searched for a class with a telling name."""
_MODULE_DICTS = ("_modules", "_parameters", "_buffers")
_MAX_DICT_KEYS = 32
"""A dict with at most this many entries is a record with names; with more, its keys are data, and fold."""
_LONGEST_NAME = 100
"""A longer key is a text: data, which folds. The longest names are those of a model's parameters."""
_ENOUGH = 3
"""Keys that only differ in numbers fold if there are at least this many: `w1` and `w2` may be a pair."""
_ENOUGH_VARIABLES = 8
"""The same for variables and attributes, which are written one by one: `layer1` to `layer4` are names."""
_NUMBERS = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[a-f]*\d)[0-9a-f]{8,}|\d+", re.IGNORECASE
)
"""Numbers in names: UUIDs, hashes and other hexadecimal numbers of eight digits or more, decimal ones.

Eight letters are a word."""
_COMMON_MODULES = ("builtins", "collections", "types", "functools")
_OF_FUNCTION = (SegmentKind.CLOSURE, SegmentKind.HOOK_CLOSURE, SegmentKind.DEFAULT_ARGUMENT)
"""Kinds of segments for a function's own tuple or dict of values: the variable follows."""


Hop = HolderPath
"""The segments that one hop adds."""


@dataclass(frozen=True)
class Path:
    """A folded path.

    Attributes:
        hops: the segments, by the hop that added them.
        outside: number of hops before the first one into the autograd graph (all, if there is none).
        namespace: the object is a dict whose keys are attribute names.
        in_graph: the object is an autograd node.
    """

    hops: tuple[Hop, ...]
    outside: int
    namespace: bool = False
    in_graph: bool = False

    @functools.cached_property
    def whole(self) -> HolderPath:
        return tuple(chain.from_iterable(self.hops))

    @functools.cached_property
    def anchor(self) -> HolderPath:
        """What the program itself holds: the path before the autograd graph."""
        if not self.attached:
            return self.whole
        return tuple(chain.from_iterable(self.hops[: self.outside]))

    @property
    def attached(self) -> bool:
        """Whether it leads through the autograd graph."""
        return self.outside < len(self.hops)

    @property
    def last(self) -> PathSegment:
        return self.hops[-1][-1]


def extend(hops: tuple[Hop, ...], hop: Hop) -> tuple[Hop, ...]:
    """Append a hop; if it occurs a third time, the chain repeats: fold it back to the second occurrence.

    Successive items of containers are no such chain. They only fold if the hops since the last item equal
    those between the last two items.
    """
    places = [at for at, before in enumerate(hops) if before == hop]
    if len(hops) <= 3 or len(places) < 2:
        return (*hops, hop)
    if hop != (ANY_ITEM,):
        return hops[: places[1] + 1]
    second, third = places[-2:]
    return hops[: third + 1] if hops[second + 1 : third] == hops[third + 1 :] else (*hops, hop)


def root_path(*segments: PathSegment, namespace: bool = False) -> Path:
    """Return the path of a root."""
    return Path((segments,), 1, namespace)


def item_segment(place: object) -> PathSegment:
    """An entry of a container, by its index or key as text."""
    return PathSegment(SegmentKind.ITEM, str(place))


def attribute_segment(name: str) -> PathSegment:
    """An attribute, or a module's variable; names of tables of hooks are like `_forward_hooks`."""
    return PathSegment(SegmentKind.HOOKS if "_hooks" in name else SegmentKind.ATTRIBUTE, name)


def key_labels(keys: Sequence[tuple[str | None, int]], namespace: bool) -> dict[int, PathSegment]:
    """Return the segment of every key of a dict, by what identifies the key's value.

    Keys that are not strings fold (`[*]`), and so do texts. String keys that only differ in numbers fold if
    there are enough of them. A dict with many keys is a table, not a record.

    Args:
        keys: (text of the key, None if it is not a string; what identifies the value).
        namespace: the keys are names of attributes.
    """
    patterns = Counter(_NUMBERS.sub("*", text) for text, _ in keys if text is not None)
    enough = _ENOUGH_VARIABLES if namespace else _ENOUGH
    many = not namespace and len(patterns) > _MAX_DICT_KEYS
    labels: dict[int, PathSegment] = {}
    for text, value_id in keys:
        if text is None or many or len(text) > _LONGEST_NAME:
            label = ANY_ITEM
        else:
            pattern = _NUMBERS.sub("*", text)
            if pattern != text and patterns[pattern] >= enough:
                text = pattern
            if text == "*" or (namespace and text.isdigit()):
                label = ANY_ITEM
            else:
                label = attribute_segment(text) if namespace else item_segment(repr(text))
        labels.setdefault(value_id, label)
    return labels


def telling_name(met: Iterable[tuple[str, str, bool]], fallback: str) -> str:
    """Return the most telling name for a garbage cycle: the first instance's of a class that is not common.

    Args:
        met: for the cycle's objects without classes: module and name of the type, and whether it is a tensor.
        fallback: the name if there are only tensors and common types.
    """
    for module, name, is_tensor in met:
        if module not in _COMMON_MODULES:
            fallback = name
            if not is_tensor:
                break
    return fallback


class FoldedPaths(ABC):
    """Paths of the objects of one graph, each shared prefix computed once.

    Args:
        parents: position of what each object was reached through; -1 for a root.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self._parents = parents
        self._known: dict[int, Path] = {}

    def path(self, position: int) -> Path:
        """The folded path of the object at a position of the graph."""
        known, parents = self._known, self._parents
        chain = []
        at = position
        while at not in known:
            chain.append(at)
            at = parents[at]
            if at < 0:
                break
        for at in reversed(chain):
            known[at] = self._root(at) if parents[at] < 0 else self._from(parents[at], at)
        return known[position]

    @abstractmethod
    def _root(self, position: int) -> Path:
        """The path of a root."""

    @abstractmethod
    def _from(self, parent: int, position: int) -> Path:
        """The path of an object through one whose path is known."""

    @abstractmethod
    def _is_module(self, position: int) -> bool:
        """Whether an object is an `nn.Module`."""

    def _add(self, before: Path, *hop: PathSegment, namespace: bool = False) -> Path:
        """Extend a path inside Python; after a hop out of the graph the anchor stays the same."""
        hops = extend(before.hops, hop) if hop else before.hops
        inside = before.attached or before.in_graph
        return Path(hops, min(before.outside, len(hops)) if inside else len(hops), namespace)

    def _graph_root(self, name: str) -> Path:
        """The path of a node that only C++ holds."""
        node = PathSegment(SegmentKind.GRAD_FN, name)
        return Path(((PathSegment(SegmentKind.NATIVE),), (node,)), 1, in_graph=True)

    def _into_graph(self, before: Path, node: str) -> Path:
        """From a tensor to the node that made it."""
        hops = extend(before.hops, (PathSegment(SegmentKind.GRAD_FN, node),))
        return Path(hops, min(before.outside, len(hops)), in_graph=True)

    def _along_graph(self, before: Path, node: str) -> Path:
        """From a node to an earlier one: only the first and the last node are named."""
        kept = before.hops[:-1] if before.last.kind is SegmentKind.LATER_NODE else before.hops
        hop = (PathSegment(SegmentKind.LATER_NODE, node),)
        return Path((*kept, hop), min(before.outside, len(kept)), in_graph=True)

    def _context_dict(self, before: Path) -> Path:
        """From a node to the dict of its attributes."""
        return Path(before.hops, before.outside, namespace=True, in_graph=True)

    def _context(self, before: Path, *segments: PathSegment) -> Path:
        """From a node to one of its attributes."""
        return Path((*before.hops, segments), before.outside)

    def _entry(self, before: Path, parent: int, label: PathSegment) -> Path:
        """From a dict to the value whose key has this label."""
        if before.in_graph:
            if label.kind is SegmentKind.ITEM:
                return self._context(before, PathSegment(SegmentKind.CONTEXT), label)
            return self._context(before, PathSegment(SegmentKind.CONTEXT, label.name))
        if before.last.kind in _OF_FUNCTION:  # keyword-only defaults
            return self._variable_of_function(before, label.name)
        if before.namespace and self._is_part_of_module(self._parents[parent], label.name):
            return self._add(before, namespace=True)
        if before.last.kind is SegmentKind.MODULE and label.kind is SegmentKind.ATTRIBUTE:
            return self._add(before, PathSegment(SegmentKind.VARIABLE, label.name))
        return self._add(before, label)

    def _is_part_of_module(self, position: int, attribute: str) -> bool:
        """Whether an attribute is a table of an `nn.Module`'s parts, which are named like attributes."""
        return attribute in _MODULE_DICTS and position >= 0 and self._is_module(position)

    def _attribute(self, before: Path, parent: int, name: str) -> Path:
        """From an instance to the value of an attribute."""
        if self._is_part_of_module(parent, name):
            return self._add(before, namespace=True)
        return self._add(before, attribute_segment(name))

    def _is_of_context(self, before: Path) -> bool:
        """Whether a path leads to an attribute of an autograd context, where a list is a record."""
        return before.last.kind is SegmentKind.CONTEXT and bool(before.last.name)

    def _place(self, before: Path, at: int | None, size: int) -> Path:
        """From a tuple to an item, by its position if that is known and the tuple is a record."""
        is_record = at is not None and size <= _MOST_IN_RECORD
        return self._add(before, item_segment(at) if is_record else ANY_ITEM)

    def _closure(self, before: Path, function: str) -> Path:
        """From a function to the tuple of its closure, which is a hook's if the path says so."""
        hooked = any(
            segment.kind in (SegmentKind.HOOKS, SegmentKind.HOOK_CLOSURE) or "hook" in segment.name
            for segment in before.whole
        )
        kind = SegmentKind.HOOK_CLOSURE if hooked else SegmentKind.CLOSURE
        return self._add(before, PathSegment(kind, function))

    def _defaults(self, before: Path, function: str, *, by_keyword: bool) -> Path:
        """From a function to the tuple or dict of its defaults."""
        return self._add(before, PathSegment(SegmentKind.DEFAULT_ARGUMENT, function), namespace=by_keyword)

    def _is_of_function(self, before: Path) -> bool:
        """Whether a path leads to a function's closure or defaults."""
        return before.last.kind in _OF_FUNCTION

    def _variable_of_function(self, before: Path, name: str) -> Path:
        """From a function's closure or defaults to a variable, in the hop that names the function."""
        kept = Path(before.hops[:-1], min(before.outside, len(before.hops) - 1), in_graph=before.in_graph)
        return self._add(kept, *before.hops[-1], PathSegment(SegmentKind.VARIABLE, name))

    def _cached(self, function: str, *, is_own_dict: bool) -> Path:
        """From a function with `lru_cache` to its results; an unbounded cache has them in a dict."""
        cache = (PathSegment(SegmentKind.LRU_CACHE, function),)
        return Path((cache,), 1) if is_own_dict else Path((cache, (ANY_ITEM,)), 2)

    def _cache_element(self, before: Path) -> Path:
        """From an element of a bounded `lru_cache` to its result or to the next element."""
        return before if before.last == ANY_ITEM else self._add(before, ANY_ITEM)

    def _running(self, before: Path, kind: SegmentKind, function: str, variable: str) -> Path:
        """From a generator's or ended function's frame to a variable."""
        return self._add(before, PathSegment(kind, function), PathSegment(SegmentKind.VARIABLE, variable))
