"""Draw a report as an image: docs/images/leak.svg.

memtriage run examples/train_gpt2.py --leak
FORCE_COLOR=1 COLUMNS=96 memtriage report memtriage-run > leak.txt
python docs/theme/report_image.py < leak.txt > docs/images/leak.svg
"""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 96


def image(report: str) -> str:
    """Return an SVG of a report in colors."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="standard"
    )
    console.print(Text.from_ansi(report.rstrip("\n")), soft_wrap=True)
    svg = console.export_svg(title="memtriage run train_gpt2.py")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # which would be loaded from elsewhere


if __name__ == "__main__":
    print(image(sys.stdin.read()))
