"""The rules that name and fold holder paths, for objects of this process and of others.

`memtriage.model.paths` says what segments are. A hop from one object to the next adds one to three of them: a
function's closure and the variable in it are one hop.

Folding keeps the number of different paths small: positions in lists and varying keys become `*`, only the
first and the last node of a walk along the graph are kept, and hops that repeat (chains of contexts) are cut
to two rounds. What follows the first object of a linked list has one path; so has a chain of exceptions.
"""

from __future__ import annotations

import functools
import re
import types
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind

CONTAINERS: Final = (dict, list, tuple, deque, set, frozenset)
GENERATORS: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
CYCLE_SEARCHED: Final = 200
"""Objects of a garbage cycle that are searched for a class with a telling name."""
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
