"""Writes docs/record-keys.md, the keys of the record, from the docstrings of their types.

python tests/support/record_keys.py > docs/record-keys.md
"""

from __future__ import annotations

import json
import re
from inspect import cleandoc
from typing import Final

import msgspec

from memtriage.model.census import CutSeen, GroupDetail
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen, Readings, Role, Situation
from memtriage.model.marks import Mark
from memtriage.model.position import TrainingPosition
from memtriage.store.records import End, HostSampleLine, Start

TYPES: Final[dict[str, type[msgspec.Struct]]] = {
    "Readings": Readings,
    "Census": CensusSeen,
    "Holder": HolderSeen,
    "Data": DataSeen,
    "Details": GroupDetail,
    "Cuts": CutSeen,
    "Role": Role,
    "Situation": Situation,
    "Position": TrainingPosition,
    "Start": Start,
    "Mark": Mark,
    "Host": HostSampleLine,
    "End": End,
}
_HEAD: Final = """\
<!-- python tests/support/record_keys.py > docs/record-keys.md: edit the docstrings of these types -->

# Keys of the record

The keys of each type of line of [the record](record.md), and of the objects in them. Sizes are bytes. A key
that is missing, or null, is unknown, unless a default is named. The [glossary](glossary.md) has *census*,
*holder*, *ledger* and *mark*.
"""


def described(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What the docstring says of each field."""
    text = cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    ([a-z_, ]+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: _json(words) for names, words in entries for name in names.split(", ")}


def _json(words: str) -> str:
    for ours, theirs in {"None": "null", "True": "`true`", "False": "`false`"}.items():
        words = words.replace(ours, theirs)
    return " ".join(words.split())


def _default(field: msgspec.structs.FieldInfo) -> str:
    shown = field.default is not msgspec.NODEFAULT and field.default
    return f" Default: `{json.dumps(field.default)}`." if shown else ""


def page() -> str:
    """The page."""
    parts = [_HEAD]
    for heading, kind in TYPES.items():
        words = described(kind)
        summary = cleandoc(kind.__doc__ or "").partition("\n")[0]
        rows = (
            f"| `{field.name}` | {words[field.name]}{_default(field)} |"
            for field in msgspec.structs.fields(kind)
        )
        parts.append("\n".join((f"\n## {heading}\n\n{summary}\n\n| key | meaning |\n|---|---|", *rows, "")))
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
