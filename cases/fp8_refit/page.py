"""The generated part of the case's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
from tables import markdown, measured_on

from memtriage.model.trials import TargetRow
from memtriage.model.units import size
from memtriage.prove.statistics import paired
from memtriage.report.trials_text import target, target_result

INSTANTS: Final = {"bf16-none": "`bf16`", "fp8-none": "`fp8`", "fp8-clear": "`fp8-clear`"}
LONG_S: Final = 10
"""Seconds from which on a step is long enough to ask for one per cent of it."""


def owners(results: Mapping[str, Any]) -> str:
    """After the refit: what each owner holds, and what it keeps from going back to the driver."""
    parts = [measured_on(results["about"])]
    columns = (
        "owner", "blocks", "bytes", "segments", "free bytes that it alone keeps", "that it keeps with others"
    )  # fmt: skip
    for name, row in INSTANTS.items():
        figures = results["after refit"][name]
        in_use = f"{size(figures['allocated'])} allocated, {size(figures['reserved'])} reserved"
        shares = [
            [
                share["owner"], f"{share['blocks']:,}", size(share["nbytes"]), str(share["segments"]),
                size(share["strands_alone"]), size(share["strands_with_others"]),
            ]
            for share in figures["shares"]
        ]  # fmt: skip
        parts.append(f"{row}: {in_use} after the refit.\n\n{markdown(columns, shares)}")
    return "\n\n".join(parts)


def segments(results: Mapping[str, Any]) -> str:
    names = {
        "map": f"map {results['gib']} GiB",
        "unmap": "unmap",
        "export": "export a bucket",
        "open": "open it",
    }
    rows = [
        [setting, *(f"{1e3 * times[name]:.1f} ms" for name in names)]
        for setting, times in results["settings"].items()
    ]
    return f"{measured_on(results['about'])}\n\n{markdown(('setting', *names.values()), rows)}"


def simulated(results: Mapping[str, Any]) -> str:
    rows = [
        [row["row"], size(row["steps"][-1]["allocated"]), size(row["steps"][-1]["reserved"])]
        for row in results["rows"]
    ]
    arguments = " ".join(results["arguments"])
    return (
        f"{measured_on(results['about'])} `simulate.py {arguments}`, after the last step's refit:\n\n"
        + markdown(("", "allocated", "reserved"), rows)
    )


def peaks(results: Mapping[str, Any]) -> str:
    """What each step reserved, by seed; the first step, in which nothing has been cleared yet, apart."""
    seeds = list(results["rows"][0]["seeds"])
    table = []
    for row in results["rows"]:
        later = [row["seeds"][seed][1:] for seed in seeds]
        every = sorted(peak for steps in later for peak in steps)
        table.append(
            [row["row"], *(size(max(steps)) for steps in later), size(round(median(every))), size(every[-1])]
        )
    arguments = " ".join(results["arguments"])
    columns = ("", *(f"seed {seed}" for seed in seeds), "median of steps", "highest")
    return (
        f"{measured_on(results['about'])} `simulate.py {arguments}`, the most reserved in steps 2 to "
        f"{len(results['rows'][0]['seeds'][seeds[0]])}:\n\n{markdown(columns, table)}"
    )


def losses(results: Mapping[str, Any]) -> str:
    told = results["losses"]
    same = len({tuple(finding) for finding in told.values()}) == 1
    ways = ", ".join(f"`{finding}`" for finding in told)
    return (
        f"Losses of the loop's steps with {ways}, on this CPU: {', '.join(told['none'])}; "
        f"{'the same' if same else 'not the same'} to the last bit with all of them."
    )


def span(figure: Mapping[str, Any] | None) -> str:
    """A size, or the range that ranks and trials span."""
    if figure is None:
        return ""
    known = [*figure["by_rank"].values(), figure["lowest"], figure["highest"]]
    low, high = size(min(known)), size(max(known))
    return low if low == high else f"{low} to {high}"


def trials(results: Mapping[str, Any]) -> str:
    """The variants of a comparison."""
    rows = []
    for variant in results["compare"]["variants"]:
        figures = variant["figures"]
        if not variant["finished"]:
            why = variant["failures"][0]["error"] if variant["failures"] else "not run"
            rows.append([f"`{variant['name']}`", why, "", "", "", "", ""])
            continue
        time = figures["time_per_step"]
        against = time["against_baseline"]
        shortest, longest = f"{time['lowest']:.1f} s", f"{time['highest']:.1f} s"
        rows.append(
            [
                f"`{variant['name']}`", str(variant["finished"]),
                shortest if shortest == longest else f"{shortest} to {longest}",
                "" if against is None else f"{against['ratio']:.3f}",
                span(figures["allocated"]), span(figures["reserved"]), span(figures["peak_reserved"]),
            ]
        )  # fmt: skip
    columns = (
        "row",
        "trials",
        "time of a step",
        "x bf16",
        "allocated after refit",
        "reserved after refit",
        "peak reserved",
    )
    return markdown(columns, rows)


def targets(results: Mapping[str, Any]) -> str:
    found = [(row, "") for row in results["compare"]["targets"]]
    later = results.get("later")
    if later is not None:
        since = f", from step {later['warmup'] + 1} on"
        found += [(aim, since) for aim in later["targets"] if aim["metric"] == "time_per_step"]
    rows = []
    for one, when in found:
        row = msgspec.convert(one, TargetRow)
        rows.append([f"{target(row)}{when}", row.verdict, target_result(row)])
    return markdown(("target", "verdict", "why"), rows)


def turns(results: Mapping[str, Any]) -> str:
    """Runs in which two treatments took turns within one process, and several runs together."""
    runs = [
        _Run(run["gpus"], run["micro_batches"], *_sides(run["turns"][results["warm_up"] :]))
        for run in results["runs"]
    ]
    long = [run for run in runs if median(run.plain) >= LONG_S]
    rows = [
        [
            str(run.gpus), str(run.micro_batches), str(len(run.plain)), f"{median(run.plain):.2f} s",
            f"{median(run.treated):.2f} s", *_compared([run]),
        ]
        for run in runs
    ] + [
        [title, "", str(sum(len(run.plain) for run in some)), "", "", *_compared(some)]
        for title, some in ((f"turns of {LONG_S} s or more", long), ("all", runs))
    ]  # fmt: skip
    columns = (
        "GPUs", "micro-batches", "pairs of turns", "plain FP8", "memtriage", "ratio, median of pairs",
        "its interval", "difference, median of pairs", "its interval",
    )  # fmt: skip
    return f"{measured_on(results['about'])}\n\n{markdown(columns, rows)}"


class _Run(NamedTuple):
    """Turns within one process: seconds of each, the same number with either treatment."""

    gpus: int
    micro_batches: int
    plain: list[float]
    treated: list[float]


def _sides(turns: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds of both treatments' turns, which make pairs in order."""
    plain = [turn["seconds"] for turn in turns if turn["treatment"] == "none"]
    treated = [turn["seconds"] for turn in turns if turn["treatment"] == "memtriage"]
    pairs = min(len(plain), len(treated))
    return plain[:pairs], treated[:pairs]


def _compared(runs: Sequence[_Run]) -> list[str]:
    """The ratio and the difference. Pairs are what is compared, whichever run they are of."""
    pairs = [pair for run in runs for pair in zip(run.treated, run.plain, strict=True)]
    told = []
    for quantities, form in (
        ([treated / plain for treated, plain in pairs], "{:.4f}"),
        ([treated - plain for treated, plain in pairs], "{:+.3f} s"),
    ):
        estimate = paired([quantities])
        assert estimate is not None
        middle, interval = estimate
        assert interval is not None
        low, high = form.format(interval.low), form.format(interval.high)
        told += [form.format(middle), f"{low} to {high} ({100 * interval.confidence:.0f} %)"]
    return told


def blocks(results: Mapping[str, Any]) -> dict[str, str]:
    two = results["two_gpus"]
    return {
        "said": owners(results["who"]),
        "segments": segments(results["segment_cost"]),
        "simulated": simulated(results["simulated"]),
        "peaks": peaks(results["peaks"]),
        "two gpus": f"{measured_on(two['about'])}\n\n{trials(two)}\n\n{targets(two)}",
        "turns": turns(results["turns"]),
        "cpu": f"{simulated(results['cpu'])}\n\n{losses(results['cpu'])}",
    }  # fmt: skip
