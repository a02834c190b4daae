"""Brings pages that lie beside the code into the site, and turns their links into the site's.

`docs/` is the root of the site; everything else keeps its path in the repository
(`cases/fp8_refit/README.md`). A file that a page links to and that is no page (a script, say) is served as it
is; of a record, a snapshot or a text of the gallery, the site has the report. MkDocs calls the functions
`on_...` (its hooks), as `mkdocs.yml` says.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

from memtriage.report.html.shell import asset, document

OUTSIDE: Final = ("cases/**/README.md", "examples/README.md", "CONTRIBUTING.md")
_DOCS: Final = "docs/"
_FITS: Final = "benchmarks/results/fits.jsonl"
# [text](target) and ![text](target "title"); not what has a scheme, and not an anchor within the page.
_LINK: Final = re.compile(
    r"(?P<text>\[[^\[\]]*)?(?P<head>\]\()(?P<target>(?![a-z]+:|#)[^)\s#]+)(?P<tail>(?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))"
)
_TEXT_STYLE: Final = "pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 var(--mono); }"
_FENCE: Final = re.compile(r"^\s*(```|~~~)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside `docs/`, and the files that pages link to."""
    root = Path(config["config_file_path"]).parent
    outside = [path for pattern in OUTSIDE for path in sorted(root.glob(pattern))]
    for path in outside:
        _add(files, root, path.relative_to(root).as_posix(), config)
    for page in [*root.glob("docs/*.md"), *outside]:
        for target in _links(page.read_text(encoding="utf-8")):
            there = posixpath.normpath(posixpath.join(page.parent.relative_to(root).as_posix(), target))
            if (report := _report(there)) is not None:
                files.append(File.generated(config, report, content=_page(root / there)))
            elif not there.startswith(_DOCS) and (root / there).is_file():
                _add(files, root, there, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make a page's links those of the site."""
    if page.parent is None:  # a list of one page beside it would only take room
        page.meta["hide"] = ["navigation"]
    root = Path(config["config_file_path"]).parent
    here = page.file.src_uri
    in_repository = here if (root / here).is_file() else _DOCS + here

    def turned(match: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), match["target"]))
        if (root / there).is_dir():  # which a site cannot show
            return (match["text"] or "[").removeprefix("[")
        there = _report(there) or there
        in_site = posixpath.relpath(there.removeprefix(_DOCS), posixpath.dirname(here) or ".")
        return f"{match['text'] or ''}{match['head']}{in_site}{match['tail']}"

    return "\n".join(_LINK.sub(turned, line) if is_text else line for line, is_text in _lines(markdown))


def _report(target: str) -> str | None:
    """Where the report of a record is in the site; None for any other file."""
    if target == _FITS:
        return "fits-table.html"
    name = re.fullmatch(r"(?:.*/(\w+)\.(?:jsonl|pickle)\.gz|docs/gallery/(\w+)\.txt)", target)
    return None if name is None else f"gallery/{name[1] or name[2]}.html"


def _page(record: Path) -> str:
    """The report of a record or snapshot; the text of a plan or prediction; the table of batches."""
    if record.name == posixpath.basename(_FITS):
        spec = importlib.util.spec_from_file_location("fits_page", record.parents[1] / "fits_page.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return str(module.committed().html())
    if record.suffix == ".txt":
        body = f"<main><pre>{escape(record.read_text(encoding='utf-8'))}</pre></main>"
        return document(record.stem, body, {}, styles=[asset("page.css"), _TEXT_STYLE], scripts=[])
    command = "snapshot" if ".pickle" in record.name else "report"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "page.html"
        words = [sys.executable, "-m", "memtriage", command, str(record), "--html", str(out)]
        subprocess.run(words, check=True, capture_output=True)
        return out.read_text(encoding="utf-8")


def _add(files: Files, root: Path, uri: str, config: Any) -> None:
    if files.get_file_from_path(uri) is None:
        files.append(File(uri, str(root), config["site_dir"], config["use_directory_urls"]))


def _links(markdown: str) -> Iterator[str]:
    return (
        match["target"] for line, is_text in _lines(markdown) if is_text for match in _LINK.finditer(line)
    )


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is text rather than code."""
    fenced = False
    for line in markdown.split("\n"):
        if _FENCE.match(line):
            fenced = not fenced
            yield line, False
        else:
            yield line, not fenced
