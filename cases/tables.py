"""The tables of the cases' pages, from the results next to them: `cases/tables.py [--check] [CASE …]`.

A page, `cases/NAME/README.md`, has what is generated between `<!-- BLOCK -->` and `<!-- /BLOCK -->`.
`cases/NAME/page.py` makes the blocks: its `blocks(results)` gets the files of `cases/NAME/results` by their
stems and returns Markdown by the block's name. `tests/cases/test_pages.py` checks that the two agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

CASES: Final = Path(__file__).parent
_BLOCK: Final = re.compile(r"<!-- (?P<name>[a-z0-9 ]+) -->\n(?P<body>.*?)<!-- /(?P=name) -->", re.DOTALL)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. A cell's `|` is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def measured_on(about: Mapping[str, Any]) -> str:
    """Device, versions and date in a line."""
    gpus = about.get("gpus", 0)
    count = {0: "", 1: "One "}.get(gpus, f"{gpus} x ")
    versions = (f"{name} {version}" for name, version in about["versions"].items())
    return ", ".join([f"{count}{about['device']}", *versions, about["date"]]) + "."


def verbatim(text: str) -> str:
    """An output, as it was printed."""
    return f"```text\n{text.rstrip()}\n```"


def cases() -> list[str]:
    """The names of the cases whose page has generated blocks."""
    return sorted(path.parent.name for path in CASES.glob("*/page.py"))


def load(case: str) -> ModuleType:
    """The module that makes a case's blocks."""
    path = CASES / case / "page.py"
    if str(CASES) not in sys.path:
        sys.path.insert(0, str(CASES))
    spec = importlib.util.spec_from_file_location(f"page_of_{case}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(case: str) -> dict[str, Any]:
    """What is kept of a case's runs, by the name of the file."""
    return {
        path.stem: json.loads(path.read_text()) for path in sorted((CASES / case / "results").glob("*.json"))
    }


def rendered(case: str) -> str:
    """The page with its blocks made again.

    Raises:
        ValueError: the page has a block that `page.py` does not make, or lacks one that it makes.
    """
    text = (CASES / case / "README.md").read_text()
    made: dict[str, str] = load(case).blocks(results(case))
    there = {match["name"] for match in _BLOCK.finditer(text)}
    if there != set(made):
        raise ValueError(f"cases/{case}: the page has blocks {sorted(there)}, page.py makes {sorted(made)}")
    return _BLOCK.sub(
        lambda match: f"<!-- {match['name']} -->\n{made[match['name']]}\n<!-- /{match['name']} -->", text
    )


def update(case: str) -> bool:
    """Writes the page again; whether that changed it."""
    page = CASES / case / "README.md"
    text = rendered(case)
    changed = text != page.read_text()
    if changed:
        page.write_text(text)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="*", help="[default: all]")
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 when a page is behind")
    options = parser.parse_args()
    behind = False
    for case in options.case or cases():
        if options.check:
            fresh = rendered(case) == (CASES / case / "README.md").read_text()
            behind |= not fresh
            print(f"cases/{case}: {'agrees with its results' if fresh else 'is behind its results'}")
        else:
            print(f"cases/{case}: {'written' if update(case) else 'unchanged'}")
    return int(behind)


if __name__ == "__main__":
    sys.exit(main())
