"""Brings pages that lie beside the code into the site, and turns their links into the site's.

`docs/` is the root of the site; everything else keeps its path in the repository
(`cases/fp8_refit/README.md`). A file that a page links to and that is no page (a script, say) is served as it
is; of a record or a snapshot, the site has the report. MkDocs calls the functions `on_...` (its hooks), as
`mkdocs.yml` says.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

OUTSIDE: Final = ("cases/**/README.md", "examples/README.md", "CONTRIBUTING.md")
_DOCS: Final = "docs/"
# [text](target) and ![text](target "title"); not what has a scheme, and not an anchor within the page.
_LINK: Final = re.compile(
    r"(?P<text>\[[^\[\]]*)?(?P<head>\]\()(?P<target>(?![a-z]+:|#)[^)\s#]+)(?P<tail>(?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))"
)
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
                command = "snapshot" if ".pickle" in there else "report"
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder) / "page.html"
                    subprocess.run(
                        [sys.executable, "-m", "memtriage", command, str(root / there), "--html", str(out)],
                        check=True,
                        capture_output=True,
                    )
                    files.append(File.generated(config, report, content=out.read_text(encoding="utf-8")))
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
    name = re.fullmatch(r".*/(\w+)\.(?:jsonl|pickle)\.gz", target)
    return None if name is None else f"gallery/{name[1]}.html"


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
