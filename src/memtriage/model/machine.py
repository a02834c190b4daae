"""What was found out about a machine, for `memtriage doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec

FactStatus = Literal["ok", "note", "bad"]
"""`note` is worth knowing, `bad` should be changed."""


class Fact(msgspec.Struct, kw_only=True):
    """One thing that was checked.

    Attributes:
        section: versions, devices, limits, settings or capabilities.
        name: what it is.
        value: what was found, in words.
        status: ok, note or bad.
        advice: what to do, unless it is ok.
    """

    section: str
    name: str
    value: str
    status: FactStatus = "ok"
    advice: str | None = None
