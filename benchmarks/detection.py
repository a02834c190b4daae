"""How small a leak the counters show, and how often they accuse a healthy program: a power study.

    python benchmarks/detection.py [--healthy N] [--leaking N] [--programs N] [--json FILE]
    python benchmarks/detection.py --record     # the reference loops again: tests/data/counter_noise.json

A series is the counter of one run, read at the end of each step. Its noise is that of recorded loops (a small
GPT-2 and an MLP; constant and varying lengths, evaluation, accumulation, a second thread that allocates), put
together again in blocks. On top of it comes what healthy programs do: tensors of varying size that are alive
at a mark, single jumps, releases, caches that fill, garbage that waits for the collector, evaluations, a log,
an allocation after the last step, marks without a reading. A leak is added to that: at each step, every k
steps, of random size, or from a late step on.

LEAK, NOT JUDGED, CLEAN
          what the run's verdict would be, by the counter alone: it grows, it may grow or is too short, it
          does not grow. LEAK also needs a holder that the census names
found     LEAK, with a rate within 20 % of the leak's
limit     what a second series of the same program without the leak states, with other noise

x limit   what the leak has kept by the end, per step of the whole run, as a multiple of the limit: what "no
          growth above L per step in N steps" excludes

Of leaks above the limit 99 in 100 have to be found.

Programs have holders, too, and are judged from the plan of censuses to the verdict (detection_programs.py):
half of them healthy, half of them with a leak.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from detection_programs import found, programs, promised, watched
from memtriage.diagnose.growth.estimate import detection_limit, grow, policy_of
from memtriage.diagnose.growth.evidence import Comparison
from memtriage.diagnose.growth.judgment import judge_counter
from memtriage.diagnose.growth.track import Points

NOISE: Final = Path(__file__).parents[1] / "tests/data/counter_noise.json"
KIB: Final = 1024
SHORTEST, LONGEST = 20, 10_000
Kind = Literal["steady", "every k steps", "of random size", "late"]
KINDS: Final[tuple[Kind, ...]] = ("steady", "every k steps", "of random size", "late")
RATIOS: Final = (0, 0.5, 1, 2, 5, float("inf"))
WORDS: Final = ("LEAK", "NOT JUDGED", "CLEAN")
SHORT: Final = 60
"""Series of each kind in the short study."""
Series = NDArray[np.float64]


# --- healthy programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A healthy program: what its counter does besides noise is the same in each run of it.

    Attributes:
        steps: its length.
        device: `cpu`, or `cuda:0`, whose counter has no noise and counts 512 bytes at a time.
        loop: the recorded noise.
        louder: the noise's size, as a multiple of the recorded.
        held: tensors alive at a mark have a random size up to so many bytes.
        shape: jumps, releases, caches, saw-teeth, evaluations.
        read: part of the marks that have a reading, after the first 100.
    """

    steps: int
    device: str
    loop: str
    louder: float
    held: float
    shape: Series
    read: float

    def series(self, noise: dict[str, Series], chance: np.random.Generator) -> tuple[Series, Series]:
        """Positions and bytes of one run."""
        values = self.shape + chance.uniform(0, self.held, self.steps)
        if self.device == "cpu":
            values = values + self.louder * again(noise[self.loop], self.steps, chance)
        kept = (np.arange(self.steps) < 100) | (chance.random(self.steps) < self.read)
        return np.flatnonzero(kept) + 1.0, values[kept]


def again(recorded: Series, steps: int, chance: np.random.Generator) -> Series:
    """A series of any length with a recorded one's beginning, and blocks of its second half after that."""
    half = len(recorded) // 2
    if steps <= half:
        return recorded[:steps]
    settled = recorded[half:]
    drift = np.polyval(np.polyfit(np.arange(len(settled)), settled, 1), np.arange(len(settled)))
    rest, parts, have = settled - drift, [], 0
    while have < steps - half:
        length = int(chance.integers(20, 100))
        start = int(chance.integers(0, max(1, len(rest) - length)))
        parts.append(rest[start : start + length])
        have += len(parts[-1])
    return np.concatenate([recorded[:half], settled.mean() + np.concatenate(parts)[: steps - half]])


def a_program(loops: list[str], chance: np.random.Generator) -> Program:
    """Draw a program: its length, its noise, and each of the things that healthy programs do now and then."""
    steps = round(SHORTEST * (LONGEST / SHORTEST) ** chance.random())
    at = np.arange(steps)
    shape = 1e9 + at * chance.uniform(0, 64)  # a log

    def nbytes(low: float, high: float) -> float:
        return float(10 ** chance.uniform(low, high))

    def happens(share: float) -> bool:
        return bool(chance.random() < share)

    for _ in range(int(chance.integers(1, 3)) if happens(0.3) else 0):
        shape += nbytes(4, 9.8) * (at >= chance.integers(1, steps))
    if happens(0.1):
        shape -= nbytes(4, 8) * (at >= chance.integers(1, steps))
    if happens(0.1):
        shape[-1] += nbytes(6, 9.8)
    if happens(0.25):
        full = chance.uniform(0.02, 0.5) * steps
        fills = np.minimum(at / full, 1) if happens(0.5) else 1 - np.exp(-4 * at / full)
        shape += nbytes(4.5, 8) * fills
    if happens(0.2):
        period = int(chance.integers(3, max(4, steps // 6)))
        shape += nbytes(4, 7.5) * ((at + chance.integers(period)) % period) / period
    if happens(0.2):
        shape += nbytes(4, 7) * (at % max(2, int(chance.integers(2, max(3, steps // 4)))) == 0)
    device = "cpu" if happens(0.7) else "cuda:0"
    held = nbytes(3.5, 6.5) if happens(0.25) else 0.0
    read = chance.uniform(0.2, 1) if device == "cpu" and happens(0.3) else 1.0
    return Program(
        steps,
        device,
        loops[int(chance.integers(len(loops)))],
        float(chance.uniform(0.5, 2)),
        held,
        shape,
        read,
    )


def leak(kind: Kind, rate: float, at: Series, steps: int, chance: np.random.Generator) -> Series:
    """Bytes that a leak of `rate` bytes per step has kept at each position."""
    if kind == "steady":
        return rate * at
    if kind == "every k steps":
        period = int(chance.integers(2, max(3, steps // 6)))
        return rate * period * (at // period)
    if kind == "late":
        return rate * np.maximum(0, at - chance.uniform(0.1, 0.6) * steps)
    return np.cumsum(chance.exponential(rate, steps + 1))[at.astype(int)]


def followed(at: Series, values: Series, device: str) -> Comparison:
    """A run of which only one counter was read."""
    comparison = Comparison("step")
    grain = 512 if device != "cpu" else 16
    for position, value in zip(at.tolist(), values.tolist(), strict=True):
        comparison.read(position, {device: int(value) // grain * grain})
    return comparison


def points(at: Series, values: Series, device: str) -> Points:
    """What a track keeps of a series."""
    return followed(at, values, device).tracks[device].points()


def word(run: Comparison, device: str) -> tuple[str, float]:
    """What a verdict says of a counter, and the rate of its growth."""
    growth, judged = run.counters[device].growth, judge_counter(run, device)
    if judged.obstacle is not None:
        return "NOT JUDGED", growth.rate
    return "LEAK" if judged.limit is None else "CLEAN", growth.rate


# --- the study --------------------------------------------------------------------------------------------


def study(healthy: int, leaking: int, seed: int) -> dict[str, object]:
    """Judge so many series of both kinds; the result is a table, as JSON."""
    noise = {
        name: np.array(values, float) for name, values in json.loads(NOISE.read_text())["series"].items()
    }
    chance = np.random.default_rng(seed)
    loops = sorted(noise)
    words: Counter[str] = Counter()
    seconds = 0.0
    for _ in range(healthy):
        program = a_program(loops, chance)
        run = followed(*program.series(noise, chance), program.device)
        kept = run.tracks[program.device].points()
        started = time.perf_counter()
        grow(kept, policy_of(program.device))
        seconds += time.perf_counter() - started
        words[word(run, program.device)[0]] += 1
    rows: dict[tuple[str, int], Counter[str]] = {}
    for _ in range(leaking):
        program = a_program(loops, chance)
        limit = detection_limit(
            points(*program.series(noise, chance), program.device), policy_of(program.device)
        )
        kind = KINDS[int(chance.integers(len(KINDS)))] if chance.random() < 0.6 else "steady"
        rate = float(2 ** chance.uniform(8, 20))
        at, values = program.series(noise, chance)
        grown = leak(kind, rate, at, program.steps, chance)
        mean = float(grown[-1] - grown[0]) / float(at[-1] - at[0])
        rate = mean if kind == "of random size" else rate
        values = values + grown
        said, found_rate = word(followed(at, values, program.device), program.device)
        ratio = 0 if limit is None else mean / limit
        row = rows.setdefault((kind, sum(ratio >= limit for limit in RATIOS) - 1), Counter())
        row["series"] += 1
        row[said] += 1
        row["found"] += said == "LEAK" and abs(found_rate - rate) <= 0.2 * rate
    return {
        "healthy": dict(words),
        "microseconds": round(seconds / max(1, healthy) * 1e6),
        "leaking": [
            {"kind": kind, "from": RATIOS[i], "to": RATIOS[i + 1] if RATIOS[i + 1] < 1e9 else None, **row}
            for (kind, i), row in sorted(rows.items(), key=lambda one: (KINDS.index(one[0][0]), one[0][1]))
        ],
        "limits": [
            {"loop": name, "steps": steps, "limit": limit_of(values[:steps])}
            for name, values in sorted(noise.items())
            for steps in (30, 300)
            if len(values) >= steps
        ]
        + [
            {"loop": "cuda, no noise", "steps": steps, "limit": limit_of(np.zeros(steps), "cuda:0")}
            for steps in (30, 300)
        ],
    }


def of_programs(count: int, seed: int) -> dict[str, object]:
    """Judge so many healthy programs, and as many that leak."""
    noise = [np.array(values, float) for values in json.loads(NOISE.read_text())["series"].values()]

    def of_a_loop(steps: int, chance: np.random.Generator) -> Series:
        return chance.uniform(0.5, 2) * again(noise[int(chance.integers(len(noise)))], steps, chance)

    healthy: Counter[str] = Counter()
    accused: Counter[str] = Counter()
    leaking: Counter[str] = Counter()
    for sound, leaks in programs(count, of_a_loop, seed):
        said = watched(sound.program).verdict
        healthy[said] += 1
        if said == "leak":
            accused[sound.kind] += 1
        said_of_leak = watched(leaks.program)
        above = "above" if promised(leaks) else "below"
        leaking[f"{above} {said_of_leak.verdict}"] += 1
        leaking[f"{above} found"] += found(leaks, said_of_leak)
    return {"healthy": dict(healthy), "accused": dict(accused), "leaking": dict(leaking)}


def limit_of(values: Series, device: str = "cpu") -> float | None:
    """The stated limit of a series as recorded."""
    return detection_limit(points(np.arange(len(values)) + 1.0, values, device), policy_of(device))


def lines(result: dict[str, object]) -> Iterator[str]:
    """The tables as text."""
    words = result["healthy"]
    assert isinstance(words, dict)
    count = sum(words.values())
    if count:
        yield f"healthy series: {count:,}; judged in {result['microseconds']} us each"
        for each in WORDS:
            yield f"  {each:10} {words.get(each, 0):6,}  {words.get(each, 0) / count:8.3%}"
    yield ""
    yield "leak            x limit      series    found     LEAK  NOT JUDGED   CLEAN"
    rows = result["leaking"]
    assert isinstance(rows, list)
    for row in rows:
        to = "     " if row["to"] is None else f"to {row['to']:g}"
        found, leak, open_, clean = (f"{row.get(name, 0) / row['series']:.1%}" for name in ("found", *WORDS))
        yield (
            f"{row['kind']:15} {row['from']:>3g} {to:6} {row['series']:9,} {found:>8} {leak:>8} {open_:>11}"
            f"{clean:>8}"
        )
    for kind in (*KINDS, "all"):
        above = [row for row in rows if kind in (row["kind"], "all") and row["from"] >= 1]
        series, found, leak, clean = (
            sum(row.get(name, 0) for row in above) for name in ("series", "found", "LEAK", "CLEAN")
        )
        if series:
            yield (
                f"{kind}, above the limit: {leak / series:.1%} LEAK, {found:,} of {series:,} found, "
                f"{found / series:.1%}; {clean:,} CLEAN"
            )
    said = result["programs"]
    assert isinstance(said, dict)
    yield ""
    for name in ("healthy", "leaking"):
        counted = ", ".join(f"{value:,} {word}" for word, value in sorted(said[name].items()))
        yield f"{name} programs: {counted}"
    yield ""
    yield "loop                             steps  limit, KiB per step"
    rows = result["limits"]
    assert isinstance(rows, list)
    for row in rows:
        yield f"{row['loop']:32} {row['steps']:5}  {(row['limit'] or float('nan')) / KIB:8.2f}"


# --- recording noise --------------------------------------------------------------------------------------


def record(name: str, steps: int) -> list[int]:
    """Train a reference loop and read malloc's counter at the end of each step; less the first reading."""
    import torch

    from memtriage.observe.malloc import malloc_info

    torch.manual_seed(0)
    lengths = random.Random(1)
    loss_of, parameters = (gpt2 if name.startswith("gpt2") else mlp)()
    optimizer = torch.optim.AdamW(parameters)
    readings: list[int] = []

    def read(*_: object) -> None:
        info = malloc_info()
        assert info is not None, "malloc is not glibc's"
        readings.append(info.in_use)

    optimizer.register_step_post_hook(read)
    stop = threading.Event()
    if "thread" in name:
        threading.Thread(target=allocate, args=(stop,), daemon=True).start()
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(4 if "accumulation" in name else 1):
            loss_of(lengths.randrange(16, 128) if "varying" in name else 64).backward()
        optimizer.step()
        if "evaluation" in name and step % 10 == 9:
            with torch.no_grad():
                _held = [loss_of(lengths.randrange(16, 128)) for _ in range(3)]
    stop.set()
    return [value - readings[0] for value in readings]


def gpt2() -> tuple[Callable[[int], object], object]:
    """A GPT-2 of 2 layers of 64, batches of 4."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, n_positions=128)
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config)

    def loss_of(length: int) -> object:
        tokens = torch.randint(0, 1000, (4, length))
        return model(tokens, labels=tokens).loss

    return loss_of, model.parameters()


def mlp() -> tuple[Callable[[int], object], object]:
    """An MLP of 3 layers, whose batch has the length."""
    import torch

    wide, narrow = torch.nn.Linear(128, 256), torch.nn.Linear(256, 10)
    model = torch.nn.Sequential(wide, torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), narrow)

    def loss_of(length: int) -> object:
        goal = torch.randint(0, 10, (length,))
        return torch.nn.functional.cross_entropy(model(torch.randn(length, 128)), goal)

    return loss_of, model.parameters()


def allocate(stop: threading.Event) -> None:
    """What a second thread does: some blocks of up to 200 kB, again and again."""
    sizes = random.Random(3)
    while not stop.wait(0.002):
        _held = [bytearray(sizes.randrange(1, 200_000)) for _ in range(sizes.randrange(1, 30))]


LOOPS: Final = {
    "gpt2, constant lengths": 400,
    "gpt2, varying lengths": 400,
    "gpt2, varying, evaluation": 400,
    "gpt2, varying, accumulation": 200,
    "gpt2, varying, thread": 400,
    "mlp, constant lengths": 600,
    "mlp, varying lengths": 600,
    "mlp, varying, thread": 600,
}


def versions() -> dict[str, str]:
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Power study of growth detection from counters.")
    parser.add_argument("--healthy", type=int, default=10_000, help="healthy series")
    parser.add_argument("--leaking", type=int, default=4_000, help="leaking series")
    parser.add_argument("--short", action="store_true", help=f"{SHORT} series of each, to see that it works")
    parser.add_argument("--programs", type=int, default=300, help="programs, healthy and as many leaking")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="record the reference loops' noise")
    parser.add_argument("--only", help="record this loop alone and print it (each needs a process)")
    parser.add_argument("--json", type=Path, help="write the result there")
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(record(asked.only, LOOPS[asked.only])))
        return
    if asked.record:
        import subprocess

        series = {}
        for name in LOOPS:
            command = [sys.executable, __file__, "--only", name]
            series[name] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            print(f"{name}: {len(series[name])} steps", file=sys.stderr)
        NOISE.write_text(json.dumps({"versions": versions(), "series": series}, separators=(",", ":")) + "\n")
        return
    healthy, leaking, made = (
        (SHORT, SHORT, SHORT // 4) if asked.short else (asked.healthy, asked.leaking, asked.programs)
    )
    result = study(healthy, leaking, asked.seed) | {"programs": of_programs(made, asked.seed)}
    print("\n".join(lines(result)))
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
