"""One HTML file that needs nothing else: styles, scripts and data inside, and nothing may be loaded.

The page's content is data. The scripts of the page build the document from it with `textContent`, so that no
name found in a recording is ever read as markup; the policy in the page's head refuses every script and style
that was not put there by `document`, and every connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

DATA_ID: Final = "data"
"""Id of the element that holds the page's data as JSON."""

LARGEST: Final = 2 * 1024 * 1024
"""Bytes that the page of a report may have, whatever was recorded."""

_STYLES: Final = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "page.js", "report.js", "table.js", "timeline.js")
_BODY: Final = (
    '<header class="masthead" id="masthead"></header>\n'
    '<main><div id="content"></div><footer id="about"></footer></main>'
)

_ASSETS: Final = files(__package__) / "assets"

_NO_SCRIPT: Final = "This page is drawn by the scripts inside it; they load nothing. Please allow them."


def asset(name: str) -> str:
    """Return the text of a file below `memtriage/report/html/assets`, e.g. `uplot/uPlot.min.css`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return _ASSETS.joinpath(*name.split("/")).read_text("utf-8")


def report_page(name: str, data: Mapping[str, Any], *scripts: str) -> str:
    """Return the page of a report on what is called `name`.

    Args:
        name: plain text.
        data: what the scripts draw.
        scripts: names of the assets that draw this report, to run after those that every report has.

    Raises:
        ValueError: `data` holds a number that is not finite.
    """
    return document(
        f"{name} · memtriage",
        _BODY,
        data,
        styles=[asset(style) for style in _STYLES],
        scripts=[asset(script) for script in (*_SCRIPTS, *scripts)],
        notice=asset("uplot/LICENSE"),
    )


def document(
    title: str,
    body: str,
    data: Mapping[str, Any],
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    notice: str = "",
) -> str:
    """Return a whole page.

    Args:
        title: plain text.
        body: trusted markup, of this package alone: nothing that was read from anywhere.
        data: what the scripts draw; plain containers, strings and finite numbers.
        styles, scripts: texts to put inside, in order. The scripts run after the body is there.
        notice: license of what is inside, which a copy must carry; trusted, without `--`.

    Raises:
        ValueError: `data` holds a number that is not finite, or a script or style would end its own element.
    """
    return "\n".join(
        (
            "<!doctype html>",
            *([f"<!-- This page contains uPlot.\n{notice}\n-->"] if notice else []),
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(styles, scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',
            f"<title>{_text(title)}</title>",
            *(_element("style", style) for style in styles),
            "</head>",
            "<body>",
            f"<noscript>{_NO_SCRIPT}</noscript>",
            body,
            f'<script type="application/json" id="{DATA_ID}">{_json(data)}</script>',
            *(_element("script", script) for script in scripts),
            "</body>",
            "</html>",
            "",
        )
    )


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "img-src data:",  # the empty icon; without it a browser asks a server for one
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _element(name: str, text: str) -> str:
    if f"</{name}" in text.lower():
        raise ValueError(f"a {name} of the page holds its own end tag")
    return f"<{name}>{text}</{name}>"


def _text(text: str) -> str:
    # Names out of a pickle can hold lone surrogates, which no file in UTF-8 can.
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def _json(data: Mapping[str, Any]) -> str:
    # ASCII, so that lone surrogates survive as escapes; without "<" nothing can end the element.
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
