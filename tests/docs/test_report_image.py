"""The picture on the first page is what this version prints."""

from __future__ import annotations

import runpy
from pathlib import Path

DRAWS = Path(__file__).parents[2] / "docs/theme/report_image.py"


def test_the_picture_is_of_the_present_report() -> None:
    module = runpy.run_path(str(DRAWS))
    assert module["IMAGE"].read_text() == module["image"](), f"run python {DRAWS}"
