"""The documentation as a site: it builds without a warning, and has every page, once, within reach."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from support import documents
from support.documents import ROOT

_LINK: Final = re.compile(r"(?:href|src)=\"?([^\">\s]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="pip install 'memtriage[docs]'")
    pytest.importorskip("material", reason="pip install 'memtriage[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install 'memtriage[docs]'")
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return built


def _rendered(page: str) -> str:
    """Where a page of the repository is in the site."""
    path = page.removeprefix("docs/").removesuffix(".md")
    path = path.removesuffix("README").removesuffix("index")
    return f"{path.rstrip('/')}/index.html".lstrip("/")


PAGES: Final = [documents.name(page) for page in documents.pages() if documents.name(page) != "README.md"]


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        there = _rendered(page)
        assert (site / there).is_file(), page
        assert f'href="{there.removesuffix("index.html") or "."}"' in home, f"{page} is not in mkdocs.yml"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        text = (site / _rendered(page)).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link)[^>]* (?:src|href)=\"?(https?://[^\">\s]+)", text)
        assert not [address for address in loaded if "canonical" not in address], page


def test_the_home_page_lists_every_page() -> None:
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert not [path.name for path in ROOT.glob("docs/*.md") if f"({path.name})" not in home + "(index.md)"]


def test_links_into_the_code_are_served(site: Path) -> None:
    page = (site / "quickstart/index.html").read_text(encoding="utf-8")
    assert "../examples/train_gpt2.py" in _LINK.findall(page)
    assert (site / "examples/train_gpt2.py").read_bytes() == (ROOT / "examples/train_gpt2.py").read_bytes()


def test_the_gallery_leads_to_reports(site: Path) -> None:
    page = (site / "gallery/index.html").read_text(encoding="utf-8")
    reports = [link for link in _LINK.findall(page) if link.endswith(".html")]
    records = re.findall(r"\.(?:gz|txt)\)", (ROOT / "docs/gallery.md").read_text(encoding="utf-8"))
    assert len(reports) == len(records) >= 12
    for report in reports:
        text = (site / "gallery" / report).read_text(encoding="utf-8")
        assert "dataset.ready" in text or "<pre" in text  # what the page of a report sets when it is drawn


def test_the_reference_has_the_docstrings(site: Path) -> None:
    page = (site / "api/index.html").read_text(encoding="utf-8")
    assert 'id="memtriage.OffloadedAdamW"' in page
    assert "Whether" in page and ":::" not in page.partition("<main")[2]


def test_blocks_of_code_say_what_they_are() -> None:
    """Without a language nothing is colored, and an indented block in a list is lost in the site."""
    unsaid = [
        f"{block.page}:{block.line}"
        for page in documents.pages()
        for block in documents.blocks(page)
        if block.language == ""
    ]
    assert not unsaid


def test_lists_are_lists_in_the_site_too() -> None:
    """Python-Markdown takes a list that follows a paragraph without an empty line for a part of it."""
    for page in documents.pages():
        fenced, before = False, ""
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            item = re.match(r"(?:[-*]|\d+\.) ", line)
            text = before and not re.match(r"\s|[-*#|<>]|\d+\. |```", before)
            assert fenced or not (item and text), f"{documents.name(page)}:{number}"
            before = line
