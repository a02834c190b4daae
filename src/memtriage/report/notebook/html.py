"""A report in a notebook as a fragment of a page: markup and styles alone, no script, nothing to load.

A notebook that is not trusted loses the styles; what is left are headings, lists and tables, in order. The
markup is in `report/html/assets/cell.html.jinja`, which escapes every value: a holder path may contain
whatever a program calls its keys.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from memtriage.model.units import count, signed, size
from memtriage.report.html.shell import asset
from memtriage.report.notebook.document import Document
from memtriage.report.notebook.words import change_in_words, peak_in_words
from memtriage.report.run.ledger import ledger

if TYPE_CHECKING:
    from jinja2 import Template

_COLORS: Final = re.compile(r":root \{(.*?)\n\}", re.DOTALL)
_VARIABLE: Final = re.compile(r"^\s*(--[\w-]+):\s*(.+?);\s*$", re.MULTILINE)
_CODE: Final = re.compile(r"`([^`]+)`")


def html(document: Document) -> str:
    """Return a report."""
    return _template().render(**document._asdict(), styles=_styles())


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment
    from markupsafe import Markup, escape

    def encodable(value: object) -> object:
        """Replace lone surrogates, which a program's names may contain and UTF-8 cannot."""
        if isinstance(value, str) and not isinstance(value, Markup):
            return value.encode("utf-8", "replace").decode("utf-8")
        return value

    def prose(text: str) -> Markup:
        return Markup(_CODE.sub(r"<code>\1</code>", str(escape(encodable(text)))))

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=encodable)
    environment.filters.update(
        prose=prose,
        size=size,
        signed=signed,
        count=count,
        trend=lambda nbytes: "less" if nbytes < 0 else "",
        peak=peak_in_words,
        change=change_in_words,
        drawn=ledger,
    )
    return environment.from_string(asset("cell.html.jinja"))


@lru_cache(maxsize=1)
def _styles() -> str:
    """Return the colors of `page.css` below `.memtriage`, then `cell.css`, without its comments."""
    match = _COLORS.search(asset("page.css"))
    assert match is not None
    colors = "".join(f"{name}:{value};" for name, value in _VARIABLE.findall(match[1]))
    own = re.sub(r"/\*.*?\*/", "", asset("cell.css"), flags=re.DOTALL)
    return f".memtriage{{{colors}}}{' '.join(own.split())}"
