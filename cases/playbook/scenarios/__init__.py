"""One scenario an entry: `SCENARIOS["M7"](device)` returns its row of the table."""

from __future__ import annotations

from collections.abc import Callable

from row import Row

from scenarios import anatomy, deaths, ladder, reading, tools_and_myths

Scenario = Callable[[str], Row]

SCENARIOS: dict[str, Scenario] = {
    "M1": anatomy.m1,
    "M2": reading.m2,
    "M3": reading.m3,
    **ladder.SCENARIOS,
    **deaths.SCENARIOS,
    "M18": tools_and_myths.m18,
    "M19": tools_and_myths.m19,
    "M20": tools_and_myths.m20,
    "M21": tools_and_myths.m21,
}
