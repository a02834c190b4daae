"""The generated part of the case's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tables import markdown, measured_on, verbatim

from memtriage.model.units import size

PLAIN, REMEDY, PATCH = "none", "remedy", "patch"
COLUMNS: Final = (
    "", "goes with the loss", "with the remedy", "with the fix of 2.15", "allocated after the step",
    "with the remedy", "peak", "with the remedy", "losses with the cures",
)  # fmt: skip
IN_THE_ISSUE: Final = {"before": 1070 << 20, "after": 290_920 << 10}
"""Bytes in use in TransformerEngine #1935."""


def mebibytes(count: int) -> str:
    """In one unit, for rows are compared; what is small in its own."""
    return size(count) if count < 1 << 20 else f"{count / (1 << 20):,.1f} MiB"


def line(found: dict[str, Any] | str) -> str:
    """What came of a run, in a line."""
    if isinstance(found, str):
        return found
    said = next((finding["holder"] for finding in found["findings"] if finding["holder"]), None)
    more = "" if said is None else f": {said}"
    return f"{size(found['stays'])} go with the loss, {found['verdict']}{more} ({found['seconds']} s)"


def most(found: Mapping[str, Any], name: str) -> int | None:
    """A figure; of several ranks the largest."""
    ranks = [rank[name] for rank in found.get("ranks", ()) if rank[name] is not None]
    figure: int | None = max(ranks) if ranks else found[name]
    return figure


def row(name: str, runs: Mapping[str, Any]) -> list[str]:
    def cell(cure: str, figure: str) -> str:
        run = runs.get(cure)
        if run is None:
            return ""
        if isinstance(run, str):
            return "not measured"
        figure_of = most(run, figure)
        return "" if figure_of is None else mebibytes(figure_of)

    return [
        name,
        *(cell(cure, "stays") for cure in (PLAIN, REMEDY, PATCH)),
        *(cell(cure, figure) for figure in ("allocated", "peak") for cure in (PLAIN, REMEDY)),
        losses(runs),
    ]


def losses(runs: Mapping[str, Any]) -> str:
    """Whether the cures leave each step's loss as it was, to the last digit printed."""
    known = [run["losses"] for run in runs.values() if not isinstance(run, str)]
    if len(known) < 2:
        return ""
    return "the same" if all(figure == known[0] for figure in known) else "differ"


def table(results: Mapping[str, Any]) -> str:
    """The rows of one machine."""
    return markdown(COLUMNS, [row(name, entry["runs"]) for name, entry in results["rows"].items()])


def said(results: Mapping[str, Any]) -> str:
    """What memtriage said of the plain runs, word for word; what several ranks have in common once."""
    launch = "" if results["ranks"] == 1 else f"torchrun --nproc-per-node {results['ranks']} -m "
    lines = []
    for entry in results["rows"].values():
        plain = entry["runs"].get(PLAIN)
        if plain is None or isinstance(plain, str) or plain["verdict"] is None:
            continue
        lines.append(f"$ {launch}memtriage run train.py {' '.join(entry['arguments'])}")
        lines.append(f"  {plain['verdict']}")
        said_of = (f"  {size(finding['bytes'])}  {finding['holder']}" for finding in plain["findings"])
        lines += dict.fromkeys(said_of)
    return verbatim("\n".join(lines))


def next_to_the_issue(results: Mapping[str, Any]) -> str:
    """Bytes allocated after the step, in the issue and here."""
    before, after = IN_THE_ISSUE["before"], IN_THE_ISSUE["after"]
    rows = [["the issue", *map(mebibytes, (before, after, before - after))]]
    for name, entry in results["rows"].items():
        plain, cured = (entry["runs"].get(cure) for cure in (PLAIN, REMEDY))
        if isinstance(plain, dict) and isinstance(cured, dict):
            had, has = most(plain, "allocated"), most(cured, "allocated")
            assert had is not None and has is not None
            rows.append([name, *map(mebibytes, (had, has, had - has))])
    return markdown(["allocated after the step", "as it was", "list dropped", "difference"], rows)


def probed(results: Mapping[str, Any]) -> str:
    """Which arguments fill the list; recipes with the same figures in one row."""
    yes = {True: "yes", False: "no"}
    recipes: dict[tuple[str, ...], list[str]] = {}
    for entry in results["rows"]:
        known = "failed" not in entry
        figures = (
            (size(entry["on contexts after backward"]), f"{entry['MiB that go with the nodes']} MiB")
            if known
            else (entry["failed"], "")
        )
        key = (entry["layer"], yes[entry["quantized parameters"]], yes[entry["checkpointed"]], *figures)
        recipes.setdefault(key, []).append(entry["recipe"])
    rows = [[layer, "; ".join(names), *cells] for (layer, *cells), names in recipes.items()]
    columns = ("layer", "recipe", "quantized parameters", "checkpointed")
    return markdown([*columns, "on the contexts after backward", "memory falls by, with the nodes"], rows)


def blocks(results: Mapping[str, Any]) -> dict[str, str]:
    probe, gpus = results["probe_h200"], results["gpus"]
    return {
        "said": said(results["gpu"]),
        "probe": f"{measured_on(probe['about'])}\n\n{probed(probe)}",
        "compared": next_to_the_issue(results["gpu"]),
        "gpu": f"{measured_on(results['gpu']['about'])}\n\n{table(results['gpu'])}",
        "gpus": f"{measured_on(gpus['about'])}\n\n{table(gpus)}\n\n{said(gpus)}",
        "cpu": f"{measured_on(results['cpu']['about'])}\n\n{table(results['cpu'])}",
    }
