"""Holder paths in a notebook's words: `kept[*]`, `Out[*]`, `last traceback -> frame train(): batch`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from memtriage.model.census import Census, HolderGroup
from memtriage.model.findings import Finding

OUTPUT: Final = "Out[*]"
"""What IPython keeps of shown values: `Out`, `_oh`, `_`, `__`, `___` and `_7` are all the same, and IPython
remembers these names' values once more."""
TRACEBACK: Final = "last traceback"

_SHELL: Final = r"__main__\.get_ipython\.__self__"
_ERROR: Final = re.compile(rf"(?:{_SHELL}\.\S+?|sys\.last_\w+?(?:\.__traceback__)?)(?= -> frame )")
_SHOWN: Final = re.compile(
    rf"(?:__main__|{_SHELL}\.displayhook)\.(?:(?:_oh|Out)(?:\[[^\]]*\])?|_(?:\d+|\*)|_{{1,3}})(?!\w)"
    rf"|{_SHELL}\.user_ns_hidden\['_(?:\d+|\*|_{{1,2}})?'\]"
)
_MAIN: Final = re.compile(r"(?<![\w.])__main__\.(?=[A-Za-z_])")
_SITE: Final = re.compile(r"(?:ipykernel_\d+/)?(?P<file>[^\s/]+?\.py|<ipython-input-[^>]*>):(?P<line>\d+)")


def in_words(text: str) -> str:
    """A path, or a sentence with paths in it."""
    return _MAIN.sub("", _SHOWN.sub(OUTPUT, _ERROR.sub(TRACEBACK, text)))


def census_in_words(census: Census) -> Census:
    """The census under a notebook's names; groups that get the same name become one."""
    groups: dict[tuple[str, str], HolderGroup] = {}
    for group in census.groups:
        anchor = in_words(group.anchor)
        own = msgspec.structs.replace(
            group,
            anchor=anchor,
            holder=in_words(group.holder),
            tails=_summed({in_words(text): nbytes} for text, nbytes in group.tails.items()),
        )
        known = groups.get((group.device, anchor))
        groups[group.device, anchor] = own if known is None else _together(known, own)
    storages = [
        msgspec.structs.replace(one, holder=None if one.holder is None else in_words(one.holder))
        for one in census.storages
    ]
    ordered = sorted(groups.values(), key=lambda group: -group.nbytes)
    return msgspec.structs.replace(census, storages=storages, groups=ordered)


def _together(one: HolderGroup, other: HolderGroup) -> HolderGroup:
    tails = _summed((one.tails, other.tails))
    return HolderGroup(
        device=one.device,
        anchor=one.anchor,
        holder=max(tails, key=lambda text: tails[text]),
        count=one.count + other.count,
        nbytes=one.nbytes + other.nbytes,
        tails=tails,
        owners=_summed((one.owners, other.owners)),
        attached=one.attached or other.attached,
        known=_summed((one.known, other.known)),
    )


def _summed(parts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def finding_in_words(finding: Finding, cell_of: Callable[[str], str | None]) -> Finding:
    """The finding under a notebook's names.

    Args:
        finding: as the watch made it.
        cell_of: the cell that a file's name (its last part) stands for, as `In[5]`; None where it is none.
    """

    def site(found: re.Match[str]) -> str:
        cell = cell_of(found["file"])
        return found[0] if cell is None else f"{cell}:{found['line']}"

    def text(given: str | None) -> str | None:
        return None if given is None else _SITE.sub(site, in_words(given))

    return msgspec.structs.replace(
        finding,
        holder=text(finding.holder),
        also_held_by=[_SITE.sub(site, in_words(one)) for one in finding.also_held_by],
        allocated_at=text(finding.allocated_at),
        mechanism=text(finding.mechanism),
        fix=text(finding.fix),
        evidence=[_SITE.sub(site, in_words(one)) for one in finding.evidence],
    )
