"""What a page of a report holds, read as a browser does."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np


def data_in(page: str) -> dict[str, Any]:
    match = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def unpack(column: dict[str, Any]) -> list[int]:
    """What `assets/page.js` does, in doubles."""
    entries = np.frombuffer(base64.b64decode(column["base64"]), f"<{column['type']}")
    return [int(float(column["from"]) + float(column["unit"]) * float(entry)) for entry in entries]
