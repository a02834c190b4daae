"""The results of `fits.py` as pages: a digest in Markdown, and one HTML file with all cells and a search."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from memtriage.report.html.shell import asset, document

HERE: Final = Path(__file__).parent
NONE: Final = "–"  # noqa: RUF001
DIGEST: Final = ("8 GB", "16 GB", "24 GB, RTX 3090 or 4090", "48 GB, L40S", "80 GB", "141 GB")
"""Cards that the digest shows; the other page has all."""
KINDS: Final = {"dense": "dense", "MoE": "mixture of experts", "VLM": "text and images"}
_BODY: Final = (
    '<header class="masthead" id="masthead"></header>\n'
    '<main><div id="content"></div><footer id="about"></footer></main>'
)


@dataclass(frozen=True)
class Table:
    """The lines of a file of results, and what `fits_models.json` says about the models."""

    lines: Sequence[dict[str, Any]]
    models: dict[str, Any]

    def markdown(self) -> str:
        """The digest: `docs/fits.md`."""
        text = (HERE / "fits.md").read_text(encoding="utf-8")
        figures = self._figures()
        figures |= {"check": fill(figures["check"], 140), "tables": "\n".join(self._tables())}
        for name, words in figures.items():
            text = text.replace(f"{{{name}}}", words)
        return text

    def html(self) -> str:
        """The page that needs nothing else."""
        styles = [asset("page.css"), (HERE / "fits.css").read_text(encoding="utf-8")]
        scripts = [*map(asset, ("page.js", "report.js", "table.js"))]
        scripts.append((HERE / "fits.js").read_text(encoding="utf-8"))
        head = self.lines[0]
        data = {
            "facts": self._figures(),
            "cards": head["cards"],
            "outside": head["outside"],
            "traced": head["traced"],
            "models": {
                name: [KINDS[model["kind"]], model["parameters"]] for name, model in self.models.items()
            },
            "ways": self._ways,
            "lines": [
                [line["model"], line["way"], line["length"], line["least"], line["cells"]]
                for line in self._of_ways
            ],
        }
        return document("Which batch fits · memtriage", _BODY, data, styles=styles, scripts=scripts)

    @property
    def _of_ways(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "cells" in line]

    @property
    def _ways(self) -> list[str]:
        return list(dict.fromkeys(line["way"] for line in self._of_ways))

    def _figures(self) -> dict[str, str]:
        head, lines = self.lines[0], [line for line in self._of_ways if line["length"] is not None]
        checks = [line for line in self.lines if "derived" in line]
        cells = len(head["cards"]) * len(lines)
        exact = sum(self._is_traced(line, card) for line in lines for card in head["cards"])
        differences = sorted(checks, key=lambda check: abs(_error(check)))
        return {
            "versions": ", ".join(f"{name} {version}" for name, version in head["versions"].items()),
            "date": head["date"],
            "models": str(len({line["model"] for line in self._of_ways})),
            "traces": str(len(head["traced"]) * len({(line["model"], line["way"]) for line in lines})),
            "cells": f"{cells:,}",
            "exact": f"{exact:,}",
            "cards": "\n".join(f"| {card} | {room / 1024:.1f} |" for card, room in head["cards"].items()),
            "check": _check(differences, head["cards"], cells - exact) if checks else "Not checked yet.",
        }

    def _is_traced(self, line: dict[str, Any], card: str) -> bool:
        """Whether what a cell needs was traced, and not derived."""
        batch = next((cell[1] for cell in line["cells"] if cell[0] == card), 1)
        return [batch, line["length"]] in self.lines[0]["traced"]

    def _tables(self) -> Iterator[str]:
        for name, model in self.models.items():
            lines = [line for line in self._of_ways if line["model"] == name]
            if not lines:
                continue
            kind, billions = KINDS[model["kind"]], model["parameters"] / 1e9
            yield f"### {name}\n\n{kind.capitalize()}, {billions:.2f} billion parameters.\n"
            yield f"| way to train | {' | '.join(DIGEST)} |"
            yield "|---|" + "---|" * len(DIGEST)
            for way in dict.fromkeys(line["way"] for line in lines):
                of_way = [line for line in lines if line["way"] == way]
                yield f"| {way} | {' | '.join(_batches(of_way, card) for card in DIGEST)} |"
            yield ""


def _batches(lines: Sequence[dict[str, Any]], card: str) -> str:
    """The largest batch at each length."""
    found = [next((str(cell[1]) for cell in line["cells"] if cell[0] == card), NONE) for line in lines]
    return " / ".join(found) if set(found) != {NONE} else NONE


def _error(check: dict[str, Any]) -> float:
    error: float = check["derived"] / check["needs"] - 1
    return error


def _check(checks: Sequence[dict[str, Any]], rooms: dict[str, int], derived: int) -> str:
    """What checking found; the largest difference is the last."""
    worst = checks[-1]
    same = sum(abs(check["derived"] - check["needs"]) <= 2 for check in checks)
    within = sum(abs(_error(check)) <= 0.01 for check in checks)
    wrong = sum(
        (check["derived"] <= rooms[check["card"]]) != (check["needs"] <= rooms[check["card"]])
        for check in checks
    )
    traces = len({tuple(check[name] for name in ("model", "way", "length", "batch")) for check in checks})
    return (
        f"Of the {derived:,} derived cells, {len(checks)} were picked at random and predicted again, from "
        f"{traces} traces of their own. {same} differ by at most 2 MiB, {within} by at most 1 %; the median "
        f"is {abs(_error(checks[len(checks) // 2])):.2%}. The largest difference is {_error(worst):+.1%}: "
        f"{worst['model']}, {worst['way']}, {worst['length']:,} tokens, batch {worst['batch']}. In {wrong} "
        "of them the answer changes: what should fit does not, or the other way around."
    )


def committed() -> Table:
    """The table of the committed results."""
    lines = (HERE / "results" / "fits.jsonl").read_text(encoding="utf-8").splitlines()
    models = json.loads((HERE / "fits_models.json").read_text(encoding="utf-8"))
    return Table([json.loads(line) for line in lines], models)
