"""The generated part of the case's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tables import markdown, measured_on, verbatim

from memtriage.model.units import size

COLUMNS: Final = (
    "", "micro-batches", "verdict", "completed", "leak per micro-batch", "named at", "full at, as said then",
    "in use after 8", "in use after the last",
)  # fmt: skip
_FIRST_LINES: Final = 3


def in_use(nbytes: int | None) -> str:
    """In one unit, for rows are compared."""
    return "" if nbytes is None else f"{nbytes / (1 << 20):,.1f} MiB"


def leak_of(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The finding of growth."""
    return next((finding for finding in found["findings"] if finding["kind"] == "leak"), None)


def line(found: Mapping[str, Any]) -> str:
    """What came of a variant, in a line."""
    start = f"{found['variant']}, {found['micro_batches']:,} micro-batches: "
    if "failed" in found:
        return start + str(found["failed"])
    leak = leak_of(found)
    grows = "" if leak is None else f", {size(leak['bytes_per_microbatch'])} per micro-batch"
    return f"{start}{found['verdict']}{grows}, {found['completed']:,} completed ({found['seconds']} s)"


def row(found: Mapping[str, Any]) -> list[str]:
    start = [found["variant"], f"{found['micro_batches']:,}"]
    if "failed" in found:
        return [*start, "not measured", *[""] * (len(COLUMNS) - 3)]
    leak = leak_of(found)
    return [
        *start,
        found["verdict"].replace("_", " "),
        f"{found['completed']:,}",
        "" if leak is None else size(leak["bytes_per_microbatch"]),
        "" if found["named_at"] is None else f"{found['named_at']:,}",
        "" if found["projected"] is None else f"{found['projected']:,}",
        in_use(found["allocated_8"]),
        in_use(found["allocated_last"]),
    ]


def table(results: Mapping[str, Any]) -> str:
    return markdown(COLUMNS, [row(entry) for entry in results["rows"] if entry is not None])


def speed(results: Mapping[str, Any]) -> str:
    """Leaking against cured, and watched against unwatched."""

    def compared(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return ""
        sure = f"{found['confidence']:.0%}"
        return f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f}, {sure})"

    rows = []
    for name, found in results["speed"].items():
        if isinstance(found, str):  # why there is nothing
            continue
        times = found["ms"]
        rows.append(
            [name, *(f"{times[way]:.2f} ms" for way in ("leaking", "cured", "cured, watched")),
             compared(found["leaking to cured"]), compared(found["watched to unwatched"])]
        )  # fmt: skip
    columns = ("", "leaking", "cured", "cured, watched", "leaking / cured", "watched / unwatched")
    return markdown(columns, rows)


def said(results: Mapping[str, Any]) -> str:
    """Lines of the first variant's micro-batches until it was named, and the finding, word for word."""
    first = next((entry for entry in results["rows"] if entry is not None and entry.get("findings")), None)
    if first is None:
        return ""
    arguments = " ".join(["--micro-batches", str(first["micro_batches"]), *first["arguments"]])
    counted = first["first_lines"][: first["named_at"] or None]
    counted = [*counted[:_FIRST_LINES], "...", counted[-1]] if len(counted) > _FIRST_LINES + 2 else counted
    grows = [] if first["said"] is None else [first["said"]]
    lines = [f"$ memtriage run --per-microbatch train.py {arguments}", *counted, *grows]
    leak = leak_of(first)
    if leak is not None:
        lines += ["", f"leak on {leak['device']}, {size(leak['bytes_per_microbatch'])} per micro-batch"]
        lines += [f"  kept alive by  {leak['holder']}", f"  allocated at   {leak['allocated_at']}"]
        lines += [f"  why           {leak['mechanism']}", f"  fix           {leak['fix']}"]
    return verbatim("\n".join(lines))


def one_machine(results: Mapping[str, Any]) -> str:
    return "\n\n".join([measured_on(results["about"]), table(results), speed(results)])


def blocks(results: Mapping[str, Any]) -> dict[str, str]:
    return {
        "said": said(results["gpu"]),
        "gpu": one_machine(results["gpu"]),
        "cpu": one_machine(results["cpu"]),
    }
