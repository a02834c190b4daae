"""Holder paths under a notebook's names: `kept[*]`, `Out[*]`, `last traceback -> frame train(): batch`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from memtriage.model.census import Census, GroupKey, HolderGroup
from memtriage.model.findings import Finding
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind, in_words

_Key = TypeVar("_Key", bound=Hashable)

_OUTPUT: Final = (PathSegment(SegmentKind.OUTPUT), ANY_ITEM)
"""What IPython keeps of shown values: `Out`, `_oh`, `_`, `__`, `___` and `_7` are all the same, and IPython
remembers these names' values once more."""
_TRACEBACK: Final = (PathSegment(SegmentKind.LAST_TRACEBACK),)
_MAIN: Final = (PathSegment(SegmentKind.MODULE, "__main__"),)
_SHELL: Final = (
    *_MAIN,
    PathSegment(SegmentKind.VARIABLE, "get_ipython"),
    PathSegment(SegmentKind.ATTRIBUTE, "__self__"),
)
_DISPLAY: Final = (*_SHELL, PathSegment(SegmentKind.ATTRIBUTE, "displayhook"))
_HIDDEN: Final = (*_SHELL, PathSegment(SegmentKind.ATTRIBUTE, "user_ns_hidden"))
_SHOWN: Final = re.compile(r"_(?:\d+|\*|_{0,2})")
_MAIN_IN_TEXT: Final = re.compile(r"(?<![\w.])__main__\.(?=[A-Za-z_])")
_SITE: Final = re.compile(r"(?:ipykernel_\d+/)?(?P<file>[^\s/]+?\.py|<ipython-input-[^>]*>):(?P<line>\d+)")


def cell_path(path: HolderPath) -> HolderPath:
    """Return a path under a notebook's names."""
    replaced, root = _root(path)
    return root + path[replaced:]


def _root(path: HolderPath) -> tuple[int, HolderPath]:
    """How many of a path's segments say no more than where a notebook keeps things, and what to call that."""
    error = _remembered_error(path)
    if error:
        return error, _TRACEBACK
    for namespace in (_DISPLAY, _MAIN):
        at = len(namespace)
        if path[:at] == namespace and len(path) > at:
            name = path[at].name
            if name in ("_oh", "Out"):
                return at + 1 + (
                    path[at + 1 : at + 2] != () and path[at + 1].kind is SegmentKind.ITEM
                ), _OUTPUT
            if _SHOWN.fullmatch(name):
                return at + 1, _OUTPUT
    at = len(_HIDDEN)
    if path[:at] == _HIDDEN and len(path) > at and _SHOWN.fullmatch(path[at].name.strip("'")):
        return at + 1, _OUTPUT
    if path[:1] == _MAIN and len(path) > 1:
        return 1, ()
    return 0, ()


def _remembered_error(path: HolderPath) -> int:
    """How many segments lead to the frames of the error that IPython or `sys` remembers; 0 for others."""
    frame = next((at for at, segment in enumerate(path) if segment.kind is SegmentKind.FRAME), 0)
    if path[: len(_SHELL)] == _SHELL:
        return frame
    of_sys = path[:1] == (PathSegment(SegmentKind.MODULE, "sys"),) and path[1:2] != ()
    return frame if of_sys and path[1].name.startswith("last_") else 0


def census_in_words(census: Census) -> Census:
    """Return the census under a notebook's names; groups that get the same name become one."""
    groups: dict[GroupKey, HolderGroup] = {}
    for group in census.groups:
        own = msgspec.structs.replace(
            group,
            anchor=cell_path(group.anchor),
            path=cell_path(group.path),
            by_path=_summed({cell_path(path): nbytes} for path, nbytes in group.by_path.items()),
        )
        known = groups.get(own.key)
        groups[own.key] = own if known is None else _together(known, own)
    storages = [
        msgspec.structs.replace(storage, path=None if storage.path is None else cell_path(storage.path))
        for storage in census.storages
    ]
    ordered = sorted(groups.values(), key=lambda group: -group.nbytes)
    return msgspec.structs.replace(census, storages=storages, groups=ordered)


def _together(first: HolderGroup, second: HolderGroup) -> HolderGroup:
    by_path = _summed((first.by_path, second.by_path))
    return HolderGroup(
        device=first.device,
        anchor=first.anchor,
        path=max(by_path, key=lambda path: by_path[path]),
        count=first.count + second.count,
        nbytes=first.nbytes + second.nbytes,
        by_path=by_path,
        owners=_summed((first.owners, second.owners)),
        attached=first.attached or second.attached,
        known=_summed((first.known, second.known)),
        holders=_summed((first.holders, second.holders)),
        kept=first.kept + second.kept,
        objects=first.objects + second.objects,
        entries=first.entries + second.entries,
    )


def _summed(parts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    total: Counter[_Key] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def finding_in_words(finding: Finding, cell_of: Callable[[str], str | None]) -> Finding:
    """Return the finding under a notebook's names.

    Args:
        finding: as the watch made it.
        cell_of: the cell that a file's name (its last part) stands for, as `In[5]`; None where it is none.
    """

    def site(match: re.Match[str]) -> str:
        cell = cell_of(match["file"])
        return match[0] if cell is None else f"{cell}:{match['line']}"

    path = finding.holder_path
    replaced, root = (0, ()) if path is None else _root(path)
    spoken = re.compile(re.escape(in_words(path[:replaced])) + r"(?!\w)") if path and root else None

    def sentence(given: str) -> str:
        """The watch has made the sentence: where it speaks of the holder, it gets the notebook's name."""
        renamed = given if spoken is None else spoken.sub(in_words(root), given)
        return _SITE.sub(site, main_left_out(renamed))

    def text(given: str | None) -> str | None:
        return None if given is None else sentence(given)

    return msgspec.structs.replace(
        finding,
        holder=None if path is not None else text(finding.holder),
        holder_path=None if path is None else cell_path(path),
        also_held_by=[],
        also_held_by_paths=[cell_path(path) for path in finding.also_held_by_paths],
        allocated_at=text(finding.allocated_at),
        stored_at=text(finding.stored_at),
        mechanism=text(finding.mechanism),
        fix=text(finding.fix),
        evidence=[sentence(line) for line in finding.evidence],
    )


def main_left_out(text: str) -> str:
    """Return a sentence that names the notebook's variables without their module."""
    return _MAIN_IN_TEXT.sub("", text)
