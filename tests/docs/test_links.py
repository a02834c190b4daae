"""Links and images of every page lead to something, in the repository as they do in the site."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from support import documents
from support.documents import ROOT


def _targets(page: Path) -> Iterator[tuple[int, str]]:
    """The line (of its paragraph) and target of each link and image."""
    for token in documents.tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                yield (token.map or [0])[0] + 1, str(target)


@cache
def _anchors(page: Path) -> frozenset[str]:
    """The headings of a page, as GitHub makes anchors of them."""
    tokens = documents.tokens(page)
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.replace("\\", "")) for title in titles]
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain)


def _in_repository(target: str) -> Path | None:
    """The file that an address of the project's own repository leads to; None for any other address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = str(project["urls"]["Homepage"])
    for start in (f"{home}/blob/main/", f"{home.replace('github.com', 'raw.githubusercontent.com')}/main/"):
        if target.startswith(start):
            return ROOT / unquote(urlsplit(target.removeprefix(start)).path)
    return None


def test_the_readme_of_a_package_index_leads_to_the_same_files(tmp_path: Path) -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in tool["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    shown = tmp_path / "README.md"
    shown.write_text(text, encoding="utf-8")
    for (_, here), (_, there) in zip(_targets(ROOT / "README.md"), _targets(shown), strict=True):
        assert there == here if urlsplit(here).scheme else _in_repository(there) == ROOT / here
        assert urlsplit(there).scheme == "https"


@pytest.mark.parametrize("page", documents.pages(), ids=documents.name)
def test_links_lead_somewhere(page: Path) -> None:
    for line, target in _targets(page):
        parts = urlsplit(target)
        own = _in_repository(target)
        if parts.scheme and own is None:
            continue
        there = own or ((page.parent / unquote(parts.path)).resolve() if parts.path else page)
        assert there.exists(), f"{documents.name(page)}:{line}: {target}"
        assert there.is_relative_to(ROOT), f"{documents.name(page)}:{line}: {target}"
        if parts.fragment and there.suffix == ".md":
            assert parts.fragment in _anchors(there), f"{documents.name(page)}:{line}: {target}"


def test_every_schema_is_linked() -> None:
    page = ROOT / "docs/cli.md"
    linked = {(page.parent / target).resolve() for _, target in _targets(page) if target.endswith(".json")}
    assert linked == set((ROOT / "src/memtriage/model/schemas").glob("*.json"))


def test_no_image_is_left_over() -> None:
    shown = {Path(target).name for page in documents.pages() for _, target in _targets(page)}
    assert not [path.name for path in (ROOT / "docs/images").iterdir() if path.name not in shown]
