"""The generated part of the case's page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tables import markdown, measured_on, verbatim

M, G = 1e6, 1e9
KINDS: Final = ("DeepSpeed pinned", "DeepSpeed pageable", "DeepSpeed")
BUFFERS: Final = (
    "fp32 master weights", "fp32 gradients", "exp_avg", "exp_avg_sq", "16-bit staging copy",
    "pinned rounding and cached", "gradient buffer that nothing uses",
)  # fmt: skip
"""Rows of the ledger that have a line of their own; the rest is summed."""
EXCESS: Final = BUFFERS[-3:]
Jobs = Mapping[str, Any]


def jobs_of(results: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The jobs of all files of GPU or CPU runs; what a later file has counts."""
    figures: dict[str, Any] = {}
    for stem, one in sorted(results.items(), key=lambda item: (item[1]["about"]["date"], item[0])):
        if "jobs" in one and (stem == "cpu") == (where == "cpu"):
            figures |= {name: ranks for name, ranks in one["jobs"].items() if isinstance(ranks, list)}
    return figures


def sources(results: Mapping[str, Any], where: str) -> str:
    """On what the files' runs were made."""
    lines = [
        f"- `results/{stem}.json`: {measured_on(result['about'])}"
        for stem, result in results.items()
        if "jobs" in result and (stem == "cpu") == (where == "cpu")
    ]
    return "\n".join(lines)


def millions(job: Mapping[str, Any]) -> str:
    return f"{job['parameters'] / M:.0f} M"


def summed(ranks: Iterable[Mapping[str, Any]], name: str, key: str) -> float:
    """Bytes per parameter, summed over the ranks."""
    ranks = list(ranks)
    total: int = sum(rank[name][key] for rank in ranks)
    return total / int(ranks[0]["parameters"])


def growth(name: str, ranks: list[dict[str, Any]]) -> list[str]:
    """A row: after `initialize` and its peak, after the last step and the highest peak."""
    kind, _, _ = name.rpartition(",")
    parameters = ranks[0]["parameters"]
    peaks = [sum(rank["peak"][key] for rank in ranks) for key in ranks[0]["peak"] if key != "initialize"]
    figures = (
        summed(ranks, "after", "initialize"), summed(ranks, "peak", "initialize"),
        summed(ranks, "after", "step 4"), max(peaks) / parameters,
        sum(rank["trimmed"] for rank in ranks) / parameters,
    )  # fmt: skip
    return [kind, millions(ranks[0]), *(f"{figure:.2f}" for figure in figures)]


def proof(jobs: Jobs) -> str:
    columns = ("", "parameters", "initialize", "peak", "four steps", "peak", "after `malloc_trim`")
    ordered = sorted(jobs.items(), key=lambda item: (item[0].rpartition(",")[0], item[1][0]["parameters"]))
    ordered.sort(key=lambda item: not item[0].startswith("DeepSpeed"))
    return markdown(columns, [growth(name, ranks) for name, ranks in ordered])


def ledger(jobs: Jobs) -> str:
    """The growth of DeepSpeed's first rank, by buffer, in bytes per parameter."""
    known = {
        name: ranks[0]
        for name, ranks in sorted(
            jobs.items(), key=lambda item: (item[0].rpartition(",")[0], item[1][0]["parameters"])
        )
        if name.rpartition(",")[0] in KINDS
    }
    shares = {name: by_buffer(one) for name, one in known.items()}
    rows = []
    for buffer in (*BUFFERS, "malloc, Python objects and the rest"):
        cells = [f"{share.get(buffer, 0) / known[name]['parameters']:.2f}" for name, share in shares.items()]
        rows.append([f"**{buffer}**" if buffer in EXCESS else buffer, *cells])
    rows.append(["sum", *(f"{figure['ledger'] / figure['parameters']:.2f}" for figure in known.values())])
    missed = [
        f"{abs(figure['after']['step 4'] - figure['ledger']) / figure['parameters']:.2f}"
        for figure in known.values()
    ]
    rows.append(["missed of the resident set", *missed])
    columns = [
        f"{name.rpartition(',')[0].removeprefix('DeepSpeed').strip() or 'CPU'}, {millions(one)}"
        for name, one in known.items()
    ]
    return markdown(["bytes per parameter", *columns], rows)


def by_buffer(one: Mapping[str, Any]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for row, nbytes in one["rows"].items():
        name = row.removesuffix(", pinned").removesuffix(", pageable")
        name = name if name in BUFFERS else "malloc, Python objects and the rest"
        peaks[name] = peaks.get(name, 0) + nbytes
    return peaks


def rounded(job: Mapping[str, Any]) -> bool:
    """Whether torch's allocator pins the large buffers, and rounds them up."""
    return bool(
        job["device"] == "cuda" and job["optimizer"] == "deepspeed" and job["pin"] and not job["remedy"]
    )


def slopes(jobs: Jobs) -> dict[str, tuple[float, float]]:
    """By kind: bytes per parameter, and bytes paid once per process, from the smallest and largest size.

    Not where torch pins: its rounding differs from size to size.
    """
    kinds: dict[str, list[tuple[int, int]]] = {}
    for name, ranks in jobs.items():
        if isinstance(ranks, list) and not rounded(ranks[0]["job"]):
            held = sum(rank["trimmed"] for rank in ranks)
            kinds.setdefault(name.rpartition(",")[0], []).append((ranks[0]["parameters"], held))
    rows = {}
    for kind, points in kinds.items():
        if len(points) > 1:
            (fewer, less), *_, (more, most) = sorted(points)
            each = (most - less) / (more - fewer)
            rows[kind] = (each, less - each * fewer)
    return rows


def from_two_sizes(jobs: Jobs) -> str:
    rows = [[kind, f"{each:.2f}", f"{once / M:.0f} MB"] for kind, (each, once) in slopes(jobs).items()]
    return markdown(("from two sizes, after `malloc_trim`", "bytes per parameter", "once per process"), rows)


def weights(jobs: Jobs) -> str:
    """Whether the remedy left the weights as they were, bit for bit."""
    pairs = [
        (name, jobs[name.replace(" + remedy", "")][0]["digest"] == ranks[0]["digest"])
        for name, ranks in jobs.items()
        if " + remedy," in name and name.replace(" + remedy", "") in jobs
    ]
    same = [name for name, alike in pairs if alike]
    return (
        "The weights after four steps are the same to the last bit with the remedy and without in "
        f"{len(same)} of {len(pairs)} pairs of rows."
    )


def said(jobs: Jobs) -> str:
    """What `host_step` printed of DeepSpeed's first calls, word for word, of each the first four lines."""
    of_deepspeed = (
        ranks[0]["calls"]
        for name, ranks in jobs.items()
        if name.startswith("DeepSpeed pinned") and ranks[0]["calls"] and not ranks[0]["job"]["remedy"]
    )
    texts = [call["text"].splitlines()[:4] for call in next(of_deepspeed, [])[:3]]
    return verbatim("\n".join(line for text in texts for line in text))


def speed(results: Mapping[str, Any]) -> str:
    one = results["h200_speed"]
    names = {
        "offloaded": "OffloadedAdamW", "deepspeed": "DeepSpeed, pinned", "deepspeed exact": "with the remedy",
        "deepspeed pageable": "DeepSpeed, pageable",
    }  # fmt: skip
    rows = [
        [words, f"{1e3 * figures['step_s']:.1f}", f"{figures['parameters'] / figures['step_s'] / G:.2f}"]
        for variant, words in names.items()
        if (figures := one["variants"].get(variant)) is not None
    ]
    size = millions(next(iter(one["variants"].values())))
    columns = (f"step, {size}, {one['threads']} threads", "ms", "Gparam/s")
    return f"{measured_on(one['about'])}\n\n{markdown(columns, rows)}"


def blocks(results: Mapping[str, Any]) -> dict[str, str]:
    gpu, cpu = jobs_of(results, "gpu"), jobs_of(results, "cpu")
    return {
        "said": said(gpu),
        "ledger": ledger(gpu),
        "gpu": "\n\n".join([sources(results, "gpu"), proof(gpu), from_two_sizes(gpu), weights(gpu)]),
        "speed": speed(results),
        "cpu": "\n\n".join([sources(results, "cpu"), proof(cpu), from_two_sizes(cpu), weights(cpu)]),
    }
