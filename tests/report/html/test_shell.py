"""Nothing that a page shows can become part of the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memtriage.report.html.shell import asset, document, report_page


class _Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.names: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)


def _page(text: str) -> str:
    return document(text, "<main></main>", {"name": text}, styles=["p { margin: 0 }"], scripts=["let a = 1;"])


_PLAIN = _Elements(_page("plain")).names


@given(st.text())
@example("</script><script>alert(1)</script>")
@example("<!-- <script>")
@example("</title><img src=x onerror=alert(1)>")
@example("a & b \"c\" 'd' \u2028 \u2029 \x00")
@example("lone \ud800 surrogate")
def test_a_name_stays_a_name(text: str) -> None:
    page = _page(text)
    page.encode("utf-8")
    assert _Elements(page).names == _PLAIN
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == {"name": text}


def test_a_report_carries_the_license_of_what_is_in_it() -> None:
    page = report_page("run", {})
    assert asset("uplot/LICENSE").strip() in page[: page.index("<head>")]


def test_the_policy_allows_what_is_there_and_nothing_else() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', _page("x"))
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    # echo -n 'let a = 1;' | openssl dgst -sha256 -binary | base64
    assert rules["script-src"] == "'sha256-xY6QKfH9PRsQnLz56nj6MBwiK5oHg+im1Jkpdp1x/Ck='"
    assert "unsafe" not in policy[1] and "http" not in policy[1]


def test_an_asset_cannot_end_its_element() -> None:
    with pytest.raises(ValueError, match="end tag"):
        document("x", "", {}, styles=[], scripts=['"</SCRIPT>"'])


def test_numbers_that_json_has_no_word_for_are_refused() -> None:
    with pytest.raises(ValueError):
        document("x", "", {"share": float("nan")}, styles=[], scripts=[])


@pytest.mark.parametrize("name", ["page.js", "report.js", "table.js", "timeline.js", "run.js", "snapshot.js"])
def test_scripts_make_no_markup_of_a_text(name: str) -> None:
    forms = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b"
    assert not re.search(forms, asset(name))


def test_chart_library_matches_licence_and_notes() -> None:
    version = re.search(r"uPlot \(v([0-9.]+)\)", asset("uplot/uPlot.iife.min.js"))
    assert version is not None
    assert version[1] in asset("README.md")
    assert "MIT License" in asset("uplot/LICENSE")


def test_own_scripts_follow_the_shared_ones() -> None:
    page = report_page("a <run>", {"title": "x"}, "run.js")
    assert "<title>a &lt;run&gt; · memtriage</title>" in page
    places = [page.index(asset(name)) for name in ("page.js", "report.js", "timeline.js", "run.js")]
    assert places == sorted(places)
    assert asset("page.css") in page
    assert asset("snapshot.js") not in page
