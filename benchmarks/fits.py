"""Which batch fits: common models, ways to train them, lengths and cards.

    python benchmarks/fits.py              # trace what is missing, then write docs/fits.md
    python benchmarks/fits.py --page FILE  # write docs/fits.md, and the table with a search as one HTML file

Each way to train a model is traced twice, with other batches and lengths. The trace of any other size is
derived: a block grows as it did between the two. It is replayed like a real trace, so one pair of traces
answers all lengths and cards. A tenth of the derived cells is predicted again, from a trace of its own.
Results are lines of `benchmarks/results/fits.jsonl`, appended as they come; another run does what is missing
there. Needs transformers, trl, peft, bitsandbytes, datasets, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

from memtriage.allocator.settings import parse_conf, parse_version
from memtriage.model.plan import PlannedPeak
from memtriage.model.units import GIB, MIB
from memtriage.planning.api import STEPS
from memtriage.planning.evaluate import planned_peak
from memtriage.planning.largest import largest
from memtriage.planning.maximize import MARGIN
from memtriage.prediction.finetuning import Finetuning
from memtriage.prediction.gpu_kinds import MEASURED, machine
from memtriage.prediction.hf import TrainingArguments, configured
from memtriage.prediction.lifetimes import LifetimeEvent
from memtriage.prediction.trace import Trace, trace

sys.path.insert(0, str(Path(__file__).parent))
import fits_page

HERE: Final = Path(__file__).parent
MODELS: Final[dict[str, Any]] = json.loads((HERE / "fits_models.json").read_text(encoding="utf-8"))
RESULTS: Final = HERE / "results" / "fits.jsonl"
PAGE: Final = HERE.parent / "docs" / "fits.md"

ADAPTERS: Final = {"optimizer": "adamw_torch_fused", "lora_r": 16, "lora_targets": "all-linear"}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "full, AdamW": {"optimizer": "adamw_torch_fused"},
    "full, AdamW, checkpointing": {"optimizer": "adamw_torch_fused", "gradient_checkpointing": True},
    "full, 8-bit AdamW, checkpointing": {
        "optimizer": "adamw_bnb_8bit", "precision": "bf16", "gradient_checkpointing": True,
    },
    "LoRA": {"method": "lora", **ADAPTERS},
    "LoRA, checkpointing": {"method": "lora", **ADAPTERS, "gradient_checkpointing": True},
    "QLoRA, checkpointing": {"method": "qlora", **ADAPTERS, "gradient_checkpointing": True},
}  # fmt: skip
"""Arguments of `TrainingArguments`."""
LEAST: Final = {"full, AdamW": 16, "full, 8-bit": 6, "LoRA": 2, "QLoRA": 0}
"""Fewest bytes per parameter: weights, gradients and states of full training, 4 + 4 + 8 and 2 + 2 + 2; frozen
weights in 16 bits. A way is not traced if these alone do not fit the largest card."""
CARDS: Final = {
    "8 GB": 7.6, "12 GB": 11.6, "16 GB": 15.6, "24 GB, L4 or A10G": 22.0, "24 GB, RTX 3090 or 4090": 23.5,
    "32 GB": 31.3, "40 GB": 39.4, "48 GB, L40S": 44.3, "80 GB": 79.1, "141 GB": 139.8,
}  # fmt: skip
"""GiB that the driver reports in all: near the totals in public error messages of PyTorch about such cards.
H100 and H200: `torch.cuda.get_device_properties`."""
LENGTHS: Final = (2048, 8192, 32768)
TRACED: Final = ((1, 8192), (2, 32768))
"""Batch and length of the two traces: what grows with the batch, the length, both, or the length's square is
2, 4, 8, or 16 times as large. Above 3,072 tokens PyTorch's embedding has other kernels than below."""
ALIKE: Final = (24, 8, 4)
"""Two traces are at the same place again where so many blocks are alike; fewer, if nowhere that many are."""
FARTHEST: Final = 4000
"""At most so many blocks ahead."""
CHECKED: Final = 0.1
"""Part of the derived cells that is predicted again."""
KIND: Final = machine(MEASURED)
VERSIONS: Final = ("torch", "transformers", "trl", "peft", "bitsandbytes")
OWNERS: Final = ("parameter", "gradient", "optimizer state", "activation", "temporary")

Growth = Callable[[int, int], int]
GROWTHS: Final[tuple[Growth, ...]] = (
    lambda batch, length: 1,
    lambda batch, length: batch * length,
    lambda batch, length: batch * (length - 1),  # labels are shifted by one
    lambda batch, length: length,
    lambda batch, length: batch,
    lambda batch, length: length * length,
    lambda batch, length: batch * length * length,
    lambda batch, length: batch * length * (length + 1),  # attention with a sink
)


class TracedPair:
    """Two traces of a program, the second with a larger batch and length.

    Args:
        points: their batches and lengths.
        traces: themselves.
    """

    def __init__(self, points: Sequence[tuple[int, int]], traces: Sequence[Trace]) -> None:
        self._points = points
        self._traces = traces
        blocks = [trace.recording.blocks for trace in traces]
        partners = aligned(*([(block.op, block.phase) for block in each] for each in blocks))
        self._sizes = [
            (None if partner is None else blocks[0][partner].size, block.size)
            for partner, block in zip(partners, blocks[1], strict=True)
        ]

    def at(self, batch: int, length: int) -> Trace:
        """The trace that another batch and length would have: what the second does, with other sizes.

        A block that grew by one of `GROWTHS` continues so; any other follows the line through its two sizes
        over the number of tokens. What only the second has grows with the number of tokens.
        """
        if (batch, length) in self._points:
            return self._traces[self._points.index((batch, length))]
        size = cache(lambda first, second: self._size(first, second, batch, length))
        sizes = [size(*pair) for pair in self._sizes]
        second = self._traces[1].recording
        recording = replace(
            second,
            events=[LifetimeEvent(each.block, each.size and sizes[each.block]) for each in second.events],
            blocks=[replace(block, size=size) for block, size in zip(second.blocks, sizes, strict=True)],
        )
        return replace(self._traces[1], recording=recording)

    def _size(self, first: int | None, second: int, batch: int, length: int) -> int:
        tokens = [batch * length for batch, length in self._points]
        if first is None:
            return max(1, second * batch * length // tokens[1])
        for growth in GROWTHS:
            at_first, at_second = (growth(*point) for point in self._points)
            if first * at_second == second * at_first:
                return max(1, first * growth(batch, length) // at_first)
        slope = (second - first) / (tokens[1] - tokens[0])
        return max(1, round(first + slope * (batch * length - tokens[0])))


def aligned(first: Sequence[Any], second: Sequence[Any]) -> list[int | None]:
    """For each element of the second sequence, the place of its partner in the first; None for none.

    Loops may have more turns in one of them, and kernels may differ: then the next place where both are alike
    is searched.

    Raises:
        ValueError: there is none.
    """
    partners: list[int | None] = []
    here = 0
    while len(partners) < len(second):
        there = len(partners)
        if here < len(first) and first[here] == second[there]:
            partners.append(here)
            here += 1
            continue
        for alike, skipped in product(ALIKE, range(1, FARTHEST)):
            if first[here : here + alike] == second[there + skipped : there + skipped + alike]:
                partners += [None] * skipped
                break
            if first[here + skipped : here + skipped + alike] == second[there : there + alike]:
                here += skipped
                break
        else:
            raise ValueError(f"the traces differ from block {here} and {there} on")
    return partners


@contextmanager
def config_of(model: str) -> Iterator[Path]:
    """A file with the configuration of a model."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(MODELS[model]["config"]))
        yield file


def traced(model: str, way: str, batch: int, length: int) -> Trace:
    """Trace the steps of a way to train a model."""
    task = "causal" if MODELS[model]["kind"] == "VLM" else "sft"
    arguments = TrainingArguments(batch=batch, seq=length, task=task, **WAYS[way])
    with config_of(model) as file:
        return trace(Finetuning(file, arguments), KIND, parse_version(None), STEPS)


def peak_of(found: Trace) -> PlannedPeak:
    """What the allocator makes of a trace."""
    return planned_peak(found, parse_conf("", parse_version(None)), KIND)


def room_of(card: str) -> int:
    """Bytes of a card that a process may use: `plan --maximize` leaves 1 % free."""
    budget = round(CARDS[card] * GIB)
    return budget - round(MARGIN * budget)


def ways_of(model: str) -> list[str]:
    """The ways to train a model: the step for images takes PyTorch's optimizers only."""
    return [way for way in WAYS if MODELS[model]["kind"] != "VLM" or "8-bit" not in way]


def rows(model: str, way: str) -> Iterator[dict[str, Any]]:
    """The lines of a way to train a model, one for each length; of one that cannot fit, one line."""
    key = {"model": model, "way": way}
    least = next(size for name, size in LEAST.items() if way.startswith(name)) * MODELS[model]["parameters"]
    if least > room_of(max(CARDS, key=lambda card: CARDS[card])):
        yield {**key, "length": None, "least": least // MIB, "cells": []}
        return
    pair = TracedPair(TRACED, [traced(model, way, *point) for point in TRACED])
    config = MODELS[model]["config"]
    longest = config.get("text_config", config)["max_position_embeddings"]
    for length in (length for length in LENGTHS if length <= longest):
        peak = cache(lambda batch, length=length: peak_of(pair.at(batch, length)))
        known = {batch: peak(batch).needs for batch in (1, 2)}
        cells = []
        for card in CARDS:
            found = largest(lambda batch, peak=peak: peak(batch).needs, 1, room_of(card), known=known)
            known = found.needs
            if found.below:
                cells.append([card, found.below, *cell(peak(found.below)), found.needs[found.above] // MIB])
        yield {**key, "length": length, "least": peak(1).needs // MIB, "cells": cells}


def cell(peak: PlannedPeak) -> list[Any]:
    """What a peak needs, its phase, and its size by owner, the last of them all others; in MiB."""
    owners = [peak.by_owner.get(owner, 0) // MIB for owner in OWNERS]
    return [peak.needs // MIB, peak.phase, *owners, peak.allocated // MIB - sum(owners)]


def checks(lines: Iterable[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """A tenth of the derived cells of a model; what does not fit is checked with one sample."""
    derived = []
    for line in lines:
        if line.get("model") == model and "cells" in line and line["length"] is not None:
            fitting = {each[0]: (each[1], each[2]) for each in line["cells"]}
            for card in CARDS:
                batch, needs = fitting.get(card, (1, line["least"]))
                if (batch, line["length"]) not in TRACED:
                    key = {name: line[name] for name in ("model", "way", "length")}
                    derived.append({**key, "card": card, "batch": batch, "derived": needs})
    return random.Random(model).sample(derived, round(CHECKED * len(derived)))


def read_results(file: Path) -> list[dict[str, Any]]:
    """The lines of a file; the last one may not be whole."""
    if not file.exists():
        return []
    whole, _, torn = file.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        file.write_text(whole + "\n", encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def generate(file: Path, models: Sequence[str]) -> None:
    """Append what a file of results lacks.

    Raises:
        SystemExit: the file is of other versions.
    """
    lines = read_results(file)

    def append(*new: dict[str, Any]) -> None:
        lines.extend(new)
        with file.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in new))
        print(json.dumps(new)[:150], file=sys.stderr, flush=True)

    versions = {name: version(name) for name in VERSIONS}
    if not lines:
        append(
            {
                "versions": versions,
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "cards": {card: room_of(card) // MIB for card in CARDS},
                "traced": TRACED,
                "outside": KIND.outside // MIB,
            }
        )
    elif lines[0]["versions"] != versions:
        raise SystemExit(f"{file} is of {lines[0]['versions']}; move it away to begin again with {versions}")
    done = {(line["model"], line["way"]) for line in lines if "cells" in line}
    for model in models:
        missing = [way for way in ways_of(model) if (model, way) not in done]
        if missing:
            count_parameters(model)
        for way in missing:
            append(*rows(model, way))
        known = {key_of(line): line["needs"] for line in lines if "derived" in line}
        checked = [{**line, "needs": None} for line in lines if "derived" in line]
        for check in checks(lines, model):
            if {**check, "needs": None} in checked:
                continue
            if (key := key_of(check)) not in known:
                found = traced(model, check["way"], check["batch"], check["length"])
                known[key] = peak_of(found).needs // MIB
            append({**check, "needs": known[key]})


def key_of(check: dict[str, Any]) -> tuple[Any, ...]:
    """Cells with the same key are checked by the same trace."""
    return tuple(check[name] for name in ("model", "way", "length", "batch"))


def count_parameters(model: str) -> None:
    """Compare the number of a configuration's parameters with the published one.

    Raises:
        SystemExit: they differ.
    """
    with config_of(model) as file, torch.device("meta"):
        _, kind, config = configured(file)
        count = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
    if count != MODELS[model]["parameters"]:
        raise SystemExit(f"{model}: {count} parameters; expected {MODELS[model]['parameters']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="only write the pages, the table as HTML here"
    )
    options = parser.parse_args()
    if options.page is None:
        generate(RESULTS, list(MODELS))
    table = fits_page.committed()
    PAGE.write_text(table.markdown(), encoding="utf-8")
    if options.page is not None:
        options.page.write_text(table.html(), encoding="utf-8")


if __name__ == "__main__":
    main()
