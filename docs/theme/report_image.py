"""Draw a report of the gallery as docs/images/leak.svg: `python docs/theme/report_image.py`."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
RECORD = "docs/gallery/losses_list_attached.jsonl.gz"
IMAGE = ROOT / "docs/images/leak.svg"
WIDTH = 96


def image() -> str:
    """Return an SVG of what `memtriage report` prints of the record in colors."""
    colors = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    report = subprocess.run(
        [sys.executable, "-m", "memtriage", "report", RECORD],
        cwd=ROOT,
        env={**colors, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    ).stdout
    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        _environ={},
    )
    console.print(Text.from_ansi(report.rstrip("\n")), soft_wrap=True)
    svg = console.export_svg(title="memtriage run losses_list_attached.py", unique_id="leak")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # which would be loaded from elsewhere


if __name__ == "__main__":
    IMAGE.write_text(image())
