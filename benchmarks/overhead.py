"""What watching costs: a training step, a whole run, a mark, the import; and that it changes no byte.

    python benchmarks/overhead.py [--device cuda|cpu] [--rounds N] [--steps N] [--parts ...] [--json FILE]

Everything that is compared runs in turns, in this one call:

step      One process trains. A round is one block of steps under each condition, in an order that rotates:
          `unwatched`, `watched` (a fresh `memtriage.watch()`, gone again at the block's end), `unwatched
          again` (the noise of this machine: it should be 1.000) and, on CUDA, `memory history` (the usual
          tool for the same question, `torch.cuda.memory._record_memory_history()`). Of each block the median
          step is taken. The ratio is taken within a round, so that a clock or a neighbor that drifts cancels
          out.
block     The same blocks, their mean step: with what happens only once in a while, such as the census at the
          third step of a watch, which a longer run spreads over more steps.
around    What the same watches took before their first step and after their last.
start-up  Seconds from the start of a process to the end of its first step, as `python SCRIPT` and as
          `memtriage run SCRIPT`: a transformers model of BERT-large's size, one of timm (without it, of many
          small modules) and a sentence encoder, all initialized at random. The watch may add 0.5 s and 2 %.
          Each result is printed when it is known.
process   The same training as `python SCRIPT` and as `memtriage run SCRIPT`, from start to exit.
heap      30 steps beside 400,000 Python objects, clean and with a leak, as `python SCRIPT` and as `memtriage
          run SCRIPT`. The watch may add 1 s and 2 %, with a leak 2.5 s and 5 %. One thread, on the CPU.
mark      One `memtriage.mark()` while a trained model is in memory.
import    `import memtriage` in a process that has imported torch; then its first watch, begun and ended.
memory    CUDA only: allocated, requested and reserved bytes behind every backward and every step, read by
          the training loop itself, watched against unwatched, in fresh processes.

Workloads: on CUDA GPT-2 small (124 M parameters), batch 8, 1,024 tokens, bf16 autocast, AdamW; on CPU a
smaller GPT-2. Both read the loss at the end of each step, as loops that log do.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

PARTS: Final = ("step", "start-up", "process", "heap", "mark", "import", "memory")
SETTLING_STEPS: Final = 2
"""Steps at the start of each block that are not timed: switching anything on or off has its own cost."""

MARKS: Final = 2000
HEAP_ROUNDS: Final = 5
START_UP_ROUNDS: Final = 5
IMPORTS: Final = 15


@dataclass(frozen=True, slots=True)
class Workload:
    """A GPT-2 to train. The defaults are GPT-2 small."""

    device: str
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    batch: int = 8
    tokens: int = 1024

    def __str__(self) -> str:
        shape = f"GPT-2, {self.layers} layers of {self.width}, batch {self.batch} x {self.tokens} tokens"
        return f"{shape}, {self.device}{', bf16 autocast' if self.device == 'cuda' else ''}"


WORKLOADS: Final = {
    "cuda": Workload("cuda"),
    "cpu": Workload("cpu", layers=4, width=256, heads=4, vocabulary=8192, batch=4, tokens=128),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Times in the unit of `unit`; `ratio` is to the unwatched of the same round."""

    part: str
    condition: str
    repeats: int
    unit: str
    median: float | None
    low_quartile: float | None = None
    high_quartile: float | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    note: str = ""


@dataclass(slots=True)
class Samples:
    """Measurements of each condition, one a round, and what else is to be said of it."""

    of: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, condition: str, value: float) -> None:
        self.of.setdefault(condition, []).append(value)

    def rows(self, part: str, unit: str) -> list[Row]:
        base = self.of["unwatched"]
        rows = []
        for condition, values in self.of.items():
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            rows.append(
                Row(
                    part,
                    condition,
                    len(values),
                    unit,
                    *median_and_quartiles(values),
                    ratio=None if values is base else statistics.median(ratios),
                    ratio_interval=None if values is base else median_interval(ratios),
                    note=self.notes.get(condition, ""),
                )
            )
        return rows


def median_and_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def median_interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap with a fixed seed."""
    import numpy as np

    picks = np.random.default_rng(0).choice(np.asarray(values), size=(draws, len(values)))
    low, high = np.quantile(np.median(picks, axis=1), [0.025, 0.975])
    return float(low), float(high)


class Training:
    """The workload, built and ready to take steps."""

    def __init__(self, workload: Workload) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=workload.vocabulary,
            n_positions=workload.tokens,
            n_embd=workload.width,
            n_layer=workload.layers,
            n_head=workload.heads,
            bos_token_id=None,
            eos_token_id=None,
        )
        self._device = workload.device
        self._model = GPT2LMHeadModel(config).to(workload.device).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        shape = (workload.batch, workload.tokens)
        self._batch = torch.randint(workload.vocabulary, shape, device=workload.device)

    def step(self, reading: Callable[[], None] = lambda: None) -> float:
        """One optimizer step; `reading` is called behind backward and at the end."""
        import torch

        on_gpu = self._device == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            loss = self._model(self._batch, labels=self._batch, use_cache=False).loss
        loss.backward()
        reading()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        value = float(loss.item())
        del loss
        reading()
        return value


def main() -> None:
    args = arguments()
    workload = WORKLOADS[args.device]
    if args.train is not None:
        train(workload, args.train, args.readings)
        return
    parts = [part for part in args.parts if part != "memory" or args.device == "cuda"]
    with tempfile.TemporaryDirectory(prefix="memtriage-benchmark-") as scratch:
        os.environ["MEMTRIAGE_DIR"] = str(Path(scratch) / "watched")
        rows = list(measured(parts, workload, args.rounds, args.steps, Path(scratch)))
    machine = describe_machine(args.device)
    print_table(machine, workload, rows)
    if args.json is not None:
        result = {
            "schema": 1,
            "machine": machine,
            "workload": asdict(workload),
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=sorted(WORKLOADS), help="default: cuda where there is one")
    parser.add_argument("--rounds", type=int, default=12, help="at least 10 for figures to be quoted")
    parser.add_argument("--steps", type=int, help="timed steps in a block (default: cuda 20, cpu 8)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    child = parser.add_argument_group("what the parts `process` and `memory` start")
    child.add_argument("--train", type=int, metavar="STEPS", help="train, measure nothing")
    child.add_argument("--readings", type=Path, metavar="FILE", help="write the memory at each mark to FILE")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: expected at least 2, for a spread")
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.steps = args.steps or {"cuda": 20, "cpu": 8}[args.device]
    return args


def measured(
    parts: Sequence[str], workload: Workload, rounds: int, steps: int, scratch: Path
) -> Iterator[Row]:
    """Rows of all parts. Those that start processes come first, while this one holds no memory."""
    if "import" in parts:
        yield from import_rows()
    if "start-up" in parts:
        yield from start_up_rows(workload.device, min(rounds, START_UP_ROUNDS), scratch)
    if "process" in parts or "memory" in parts:
        yield from process_rows(parts, workload, max(3, rounds // 3), SETTLING_STEPS + steps, scratch)
    if "heap" in parts:
        yield from heap_rows(min(rounds, HEAP_ROUNDS), scratch)
    if "step" in parts or "mark" in parts:
        training = Training(workload)
        for _ in range(5):
            training.step()
        if "step" in parts:
            yield from step_rows(training, workload, rounds, steps)
        if "mark" in parts:
            yield mark_row()


# --- a training step -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """Milliseconds of one block: its median step, its mean step, and what lay around its steps."""

    median: float
    mean: float
    around: float


def step_rows(training: Training, workload: Workload, rounds: int, steps: int) -> list[Row]:
    conditions = step_conditions(workload.device)
    names = list(conditions)
    usual = Samples({name: [] for name in names})
    whole = Samples({name: [] for name in names}, {"watched": f"blocks of {steps} steps, censuses included"})
    around: list[float] = []
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            block = timed_block(training, conditions[name], steps)
            usual.add(name, block.median)
            whole.add(name, block.mean)
            if name == "watched":
                around.append(block.around)
        progress(f"step: round {number + 1} of {rounds}")
    begin_and_end = Row("around", "watched", rounds, "ms", *median_and_quartiles(around))
    return [*usual.rows("step", "ms"), *whole.rows("block", "ms"), begin_and_end]


def step_conditions(device: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    import memtriage

    conditions: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "unwatched": nullcontext,
        "watched": lambda: memtriage.watch(quiet=True),
        "unwatched again": nullcontext,
    }
    if device == "cuda":
        conditions["memory history"] = memory_history
    return conditions


@contextmanager
def memory_history() -> Iterator[None]:
    """PyTorch's own recorder, as its documentation switches it on."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def timed_block(
    training: Training, condition: Callable[[], AbstractContextManager[Any]], steps: int
) -> Block:
    """One fresh block under a condition. Every step ends with the device idle, since it reads the loss."""
    gc.collect()
    times = []
    begun = time.perf_counter()
    with condition() as watch:
        settling = time.perf_counter()
        for _ in range(SETTLING_STEPS):
            training.step()
        before = time.perf_counter()
        around = settling - begun
        for _ in range(steps):
            training.step()
            after = time.perf_counter()
            times.append(1000 * (after - before))
            before = after
    around += time.perf_counter() - before
    if watch is not None and watch.report.steps != SETTLING_STEPS + steps:
        raise SystemExit(f"the watch saw {watch.report.steps} of {SETTLING_STEPS + steps} steps: no figures")
    return Block(statistics.median(times), statistics.fmean(times), 1000 * around)


# --- a whole process -------------------------------------------------------------------------------------


def process_rows(
    parts: Sequence[str], workload: Workload, rounds: int, steps: int, scratch: Path
) -> list[Row]:
    """Whole runs in turns; on CUDA each also writes down its memory at every mark."""
    samples = Samples()
    readings: dict[str, list[Any]] = {"unwatched": [], "watched": []}
    names = list(readings)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds, verdict, read = whole_process(name == "watched", workload, steps, scratch)
            samples.add(name, seconds)
            readings[name].append(read)
            if verdict is not None:
                samples.notes[name] = f"{steps} steps; verdict {verdict}"
        progress(f"process: round {number + 1} of {rounds}")
    rows = samples.rows("process", "s") if "process" in parts else []
    return rows + ([memory_row(readings)] if "memory" in parts else [])


def whole_process(
    watched: bool, workload: Workload, steps: int, scratch: Path
) -> tuple[float, str | None, list[list[int]]]:
    """Seconds of one run, its verdict when watched, and the memory at each of its marks."""
    readings, report = scratch / "readings.json", scratch / "report.json"
    run = ["-m", "memtriage", "run", "--json", str(report)] if watched else []
    script = [__file__, "--device", workload.device, "--train", str(steps), "--readings", str(readings)]
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *run, *script], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(done.args)} exited with {done.returncode}:\n{done.stderr[-2000:]}")
    verdict = json.loads(report.read_text())["verdict"] if watched else None
    return seconds, verdict, json.loads(readings.read_text())


def train(workload: Workload, steps: int, path: Path | None) -> None:
    """What those processes do. Readings are numbers, kept until the end."""
    import torch

    readings: list[tuple[int, int, int]] = []

    def read() -> None:
        stats = torch.cuda.memory_stats()
        names = ("allocated_bytes", "requested_bytes", "reserved_bytes")
        allocated, requested, reserved = (stats[f"{name}.all.current"] for name in names)
        readings.append((allocated, requested, reserved))

    training = Training(workload)
    for _ in range(steps):
        training.step(read if workload.device == "cuda" else lambda: None)
    if path is not None:
        path.write_text(json.dumps(readings))


def memory_row(readings: dict[str, list[Any]]) -> Row:
    """Whether watched runs read the same bytes at every mark, and whether unwatched ones agree at all."""
    first, *repeats = readings["unwatched"]
    notes = [f"{len(first)} marks"]
    notes += [f"watched: {differences(first, readings['watched'])}"]
    notes += [f"unwatched again: {differences(first, repeats)}"]
    return Row("memory", "watched", len(readings["watched"]), "runs", None, note="; ".join(notes))


def differences(first: list[list[int]], others: list[list[list[int]]]) -> str:
    """In words: which of the three figures differ from those of the first run, and by how much."""
    largest = [0, 0, 0]
    for run in others:
        for ours, theirs in zip(run, first, strict=True):
            largest = [max(known, abs(a - b)) for known, a, b in zip(largest, ours, theirs, strict=True)]
    names = ("allocated", "requested", "reserved")
    found = [f"{name} differs by {size:,} B" for name, size in zip(names, largest, strict=True) if size]
    return ", ".join(found) or "equal to the byte"


# --- until the first step --------------------------------------------------------------------------------

START_UP_PROGRAM: Final = """
import os
import sys
import time

import torch

kind, device = sys.argv[1:]
torch.manual_seed(0)
if kind == "BERT-large":
    from transformers import BertConfig, BertForMaskedLM

    large = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model, shape = BertForMaskedLM(BertConfig(**large)), (2, 16)
elif kind == "sentence encoder":
    from transformers import AutoModel, BertConfig

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = AutoModel.from_config(BertConfig())
            self.head = torch.nn.Linear(768, 768)

        def forward(self, ids):
            return self.head(self.bert(input_ids=ids).last_hidden_state.mean(1))

    model, shape = Encoder(), (2, 16)
else:
    try:
        import timm

        model = timm.create_model("efficientnetv2_s", num_classes=100)
    except ImportError:
        block = lambda: torch.nn.Sequential(
            torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU()
        )
        stem = torch.nn.Conv2d(3, 64, 7, 4)
        model = torch.nn.Sequential(stem, *[block() for _ in range(600)])
    shape = (2, 3, 64, 64)
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
made = torch.randn(shape) if len(shape) == 4 else torch.randint(1000, shape)
output = model(made.to(device))
loss = getattr(output, "logits", output).float().square().mean()
loss.backward()
optimizer.step()
loss.item()
with open("/proc/self/stat") as file:
    ticks = int(file.read().rpartition(")")[2].split()[19])
since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
print("first step", since_boot - ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), flush=True)
os._exit(0)  # what follows is in the parts `process` and `heap`
"""

START_UP_ALLOWED: Final = (0.5, 0.02)
"""By how much a watched first step may be later: seconds, and a part of the unwatched time."""


def start_up_rows(device: str, rounds: int, scratch: Path) -> Iterator[Row]:
    """Seconds to the first step in turns, after one run of each that warms the caches of the disk."""
    script = scratch / "start_up.py"
    script.write_text(START_UP_PROGRAM)
    for kind in ("BERT-large", "many modules", "sentence encoder"):
        walls = Samples({"unwatched": [], "watched": []})
        processor: dict[str, list[float]] = {"unwatched": [], "watched": []}
        for number in range(1 + rounds):
            for name in ("unwatched", "watched") if number % 2 == 0 else ("watched", "unwatched"):
                wall, used = first_step(name == "watched", script, kind, device)
                progress(f"start-up, {kind}, {name}: {wall:.2f} s{', to warm up' if not number else ''}")
                if number:
                    walls.add(name, wall)
                    processor[name].append(used)
        plain, watched = map(statistics.median, walls.of.values())
        seconds, part = START_UP_ALLOWED
        extra = statistics.median(processor["watched"]) - statistics.median(processor["unwatched"])
        walls.notes["watched"] = (
            f"{watched - plain:.2f} s later ({extra:.2f} s of the processor), "
            f"allowed {seconds + part * plain:.2f} s"
        )
        for row in walls.rows("start-up", "s"):
            shown = replace(row, condition=f"{kind}, {row.condition}")
            print("  ".join(filter(None, cells(shown))), flush=True)
            yield shown


def first_step(watched: bool, script: Path, kind: str, device: str) -> tuple[float, float]:
    """Seconds of the clock and of the processor until the first step of a process is complete."""
    run = ["-m", "memtriage", "run"] if watched else []
    command = [sys.executable, *run, str(script), kind, device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("first step ")), None)
    if line is None:
        raise SystemExit(f"{' '.join(command)} made no step:\n{done.stderr[-2000:]}")
    wall, used = map(float, line.split()[2:])
    return wall, used


# --- a large heap ----------------------------------------------------------------------------------------

HEAP_PROGRAM: Final = """
import gc
import sys

import torch


class Record:
    def __init__(self, number):
        self.name = f"record {number}"
        self.values = [number, number + 0.5, str(number)]
        self.meta = {"number": number, "tags": [number]}


torch.manual_seed(0)
layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
records = [Record(number) for number in range((400_000 - len(gc.get_objects())) // 4)]
batch = torch.randn(8, 16, 64)
losses = []
for step in range(30):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if sys.argv[1] == "leaking":
        losses.append(loss)
"""

HEAP_ALLOWED: Final = {"clean": (1.0, 0.02), "leaking": (2.5, 0.05)}
"""By how much a watched run may take longer: seconds, and a part of the unwatched run."""


def heap_rows(rounds: int, scratch: Path) -> Iterator[Row]:
    """Seconds of whole runs in turns; in the notes also of the processor, which depend less on the load."""
    script = scratch / "heap.py"
    script.write_text(HEAP_PROGRAM)
    for kind, (seconds, part) in HEAP_ALLOWED.items():
        walls = Samples({"unwatched": [], "watched": []})
        processor: dict[str, list[float]] = {"unwatched": [], "watched": []}
        verdicts: set[str] = set()
        for number in range(rounds):
            for name in ("unwatched", "watched") if number % 2 == 0 else ("watched", "unwatched"):
                wall, used, verdict = heap_process(name == "watched", script, kind)
                walls.add(name, wall)
                processor[name].append(used)
                verdicts |= {verdict} if verdict is not None else set()
            progress(f"heap, {kind}: round {number + 1} of {rounds}")
        plain, watched = map(statistics.median, walls.of.values())
        longer, allowed = watched - plain, seconds + part * plain
        extra = min(processor["watched"]) - min(processor["unwatched"])
        walls.notes["watched"] = (
            f"{longer:.2f} s longer ({extra:.2f} s of the processor), allowed {allowed:.2f} s; "
            f"verdict {' or '.join(sorted(verdicts))}"
        )
        for row in walls.rows("heap", "s"):
            yield replace(row, condition=f"{kind}, {row.condition}")


def heap_process(watched: bool, script: Path, kind: str) -> tuple[float, float, str | None]:
    """Seconds of one run, of the clock and of the processor, and its verdict when watched."""
    report = script.with_name("report.json")
    run = ["-m", "memtriage", "run", "--json", str(report)] if watched else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, *run, str(script), kind], check=True, capture_output=True, env=environment
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, used, json.loads(report.read_text())["verdict"] if watched else None


# --- a mark, the import ----------------------------------------------------------------------------------


def mark_row() -> Row:
    import memtriage

    times = []
    with memtriage.watch(quiet=True) as watch:
        for _ in range(MARKS):
            started = time.perf_counter()
            memtriage.mark("benchmark")
            times.append(1e6 * (time.perf_counter() - started))
    assert watch.report is not None
    recorded = sum(mark.name == "benchmark" for mark in watch.report.marks)
    if recorded < MARKS:
        raise SystemExit(f"the watch recorded {recorded} of {MARKS} marks: no figures")
    p99 = statistics.quantiles(times, n=100)[98]
    note = f"p99 {p99:.0f}, slowest {max(times):.0f}"
    return Row("mark", "watched", MARKS, "us", *median_and_quartiles(times), note=note)


IMPORT_PROGRAM: Final = """
import time
import torch
started = time.perf_counter()
import memtriage
imported = time.perf_counter()
with memtriage.watch(quiet=True):
    pass
print(imported - started, time.perf_counter() - imported)
"""


def import_rows() -> list[Row]:
    imported, watched = [], []
    for _ in range(IMPORTS):
        program = [sys.executable, "-c", IMPORT_PROGRAM]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        first, second = map(float, done.stdout.split()[-2:])
        imported.append(1000 * first)
        watched.append(1000 * second)
    progress(f"import: {IMPORTS} processes")
    rows = (
        ("import memtriage", imported, "in a process that has imported torch"),
        ("first watch()", watched, "begun and ended at once, with its imports and its census at the end"),
    )
    return [
        Row("import", name, IMPORTS, "ms", *median_and_quartiles(times), note=note)
        for name, times, note in rows
    ]


# --- output ----------------------------------------------------------------------------------------------


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_machine(device: str) -> dict[str, str | int | None]:
    import torch

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_15_min": round(os.getloadavg()[2], 1),
    }


def print_table(machine: dict[str, Any], workload: Workload, rows: Sequence[Row]) -> None:
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{workload}\n")
    head = ("part", "condition", "n", "median", "quartiles", "against unwatched", "95 % interval", "")
    lines = [head, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def cells(row: Row) -> tuple[str, ...]:
    interval = row.ratio_interval
    return (
        row.part,
        row.condition,
        str(row.repeats),
        "" if row.median is None else f"{row.median:.2f} {row.unit}",
        "" if row.low_quartile is None else f"{row.low_quartile:.2f} to {row.high_quartile:.2f}",
        "" if row.ratio is None else f"x {row.ratio:.4f}",
        "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}",
        row.note,
    )


if __name__ == "__main__":
    main()
