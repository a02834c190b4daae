"""Where the time of an offloaded step goes, and which settings of the ring and the kernel suit a machine.

    python benchmarks/offload_settings.py [--layers N] [--width N] [--steps N] [--seconds N] [--quick]
                                          [--out FILE]

Bfloat16 weights with constant gradients, in one process. First the parts alone:

copy           a plain copy between two host buffers: the limit, for the 28 bytes per parameter that a step
               must move over the memory bus
torch fused    torch's fused AdamW on float32 CPU parameters and gradients
kernel alone   the compiled kernel on bfloat16 gradients that are on the host already, weights rounded
down, up       copies between the ring's memory and the device, tile by tile

then `optimizer.step()` under each of the settings, by median, and what the moving thread waited for: tiles
to arrive, slots to be left, the kernel; `rest` is its own work. With `--quick` only the default settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from memtriage import OffloadedAdamW
from memtriage.treat.offload.arithmetic import crew_size
from memtriage.treat.offload.kernel import Hyper, Operands, Scaling
from memtriage.treat.offload.native.choice import available
from memtriage.treat.offload.native.library import Crew, Library
from memtriage.treat.offload.pinned import host_memory
from memtriage.treat.offload.pipeline import Ring, Spent, lane_to
from memtriage.treat.offload.settings import RING_DEPTH, TILE_ELEMENTS

BYTES_MOVED: Final = 28
UNTIMED_STEPS: Final = 2
HYPER: Final = Hyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, maximize=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of settings; `run` and `threads` are of the compiled kernel, 0 for the default."""

    kernel: str = "compiled"
    tile: int = TILE_ELEMENTS
    depth: int = RING_DEPTH
    run: int = 0
    threads: int = 0
    state: str = "float32"
    gradients: str = "device"


def candidates() -> Iterator[Candidate]:
    """The defaults, then one setting changed at a time."""
    yield Candidate()
    for factor in (8, 4, 2):
        yield Candidate(tile=TILE_ELEMENTS // factor)
    yield Candidate(tile=TILE_ELEMENTS * 2)
    for depth in (2, 3, 6):
        yield Candidate(depth=depth)
    all_of_them = torch.get_num_threads()
    for threads in sorted({all_of_them, all_of_them - 2, all_of_them - 4, all_of_them // 2}):
        if threads > 0:
            yield Candidate(threads=threads)
    for run in (1 << 13, 1 << 17):
        yield Candidate(run=run)
    yield Candidate(state="bfloat16")
    yield Candidate(gradients="host")
    for tile in (TILE_ELEMENTS // 4, TILE_ELEMENTS, TILE_ELEMENTS * 2):
        yield Candidate(kernel="torch", tile=tile)


def best(work: Callable[[], Any], times: int = 5) -> float:
    """Seconds, the fastest of several after one that does not count."""
    work()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def reserved(count: int, dtype: torch.dtype) -> Tensor:
    return host_memory(count * dtype.itemsize).view(dtype)


def parts_alone(count: int, library: Library | None) -> dict[str, float]:
    """Seconds of each part of a step on `count` elements."""
    rates = {}
    rates["copy"] = copy_alone(count)
    master, average, square, gradient = (reserved(count, torch.float32).zero_() for _ in range(4))
    steps = [torch.tensor(3.0)]

    def fused() -> None:
        torch._fused_adamw_(
            [master],
            [gradient],
            [average],
            [square],
            [],
            steps,
            lr=HYPER.lr,
            beta1=HYPER.beta1,
            beta2=HYPER.beta2,
            weight_decay=HYPER.weight_decay,
            eps=HYPER.eps,
            amsgrad=False,
            maximize=False,
        )

    rates["torch fused"] = best(fused)
    narrow, rounded = (reserved(count, torch.bfloat16).zero_() for _ in range(2))
    whole = Operands([master], [narrow], [average], [square], steps, [rounded])
    for threads in sorted({torch.get_num_threads(), crew_size(torch.get_num_threads())}):
        if library is not None:
            crew = Crew(library, threads)

            def kernel(crew: Crew = crew) -> None:
                job = crew.job(whole, HYPER, Scaling())
                job.start()
                job.wait()

            rates[f"kernel alone, {threads} threads"] = best(kernel)
            crew.close()
    return rates | copies_alone(count)


def copy_alone(count: int) -> float:
    """The limit: a copy's bytes are those it reads and those it writes."""
    source = torch.ones((1 << 28) if torch.cuda.is_available() else (1 << 25))
    target = torch.zeros_like(source)
    return BYTES_MOVED * count * best(lambda: target.copy_(source)) / (2 * source.nbytes)


def copies_alone(count: int) -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    lane = lane_to(torch.device("cuda"))
    device = torch.zeros(count, device="cuda", dtype=torch.bfloat16)
    ring = Ring(TILE_ELEMENTS, 2, pin=True)

    def all_of(both: bool, way: str) -> None:
        for number, at in enumerate(range(0, count - TILE_ELEMENTS + 1, TILE_ELEMENTS)):
            slot, there = ring.slots[number % 2], device[at : at + TILE_ELEMENTS]
            slot.arrived()
            slot.vacated()
            if both or way == "down":
                slot.fetch(lane, [slot.down(torch.bfloat16)[:TILE_ELEMENTS]], [there])
            if both or way == "up":
                slot.send(lane, [there], [slot.up(torch.bfloat16)[:TILE_ELEMENTS]])
        torch.cuda.synchronize()

    rates = {way: best(lambda way=way: all_of(False, way)) for way in ("down", "up")}  # type: ignore[misc]
    rates["down and up"] = best(lambda: all_of(True, ""))
    ring.close()
    return rates


def stepping(candidate: Candidate, weights: list[Any], steps: int, library: Library | None) -> dict[str, Any]:
    """Median seconds of a step and of what the moving thread did in it; bytes of host memory reserved."""
    made = OffloadedAdamW(
        weights,
        lr=HYPER.lr,
        kernel=candidate.kernel,
        tile_elements=candidate.tile,
        ring_depth=candidate.depth,
        state_dtype=getattr(torch, candidate.state),
        gradients=candidate.gradients,
    )
    engine = made._machine.engine
    kernel = engine.arithmetic
    if candidate.kernel == "compiled" and library is not None and (candidate.run or candidate.threads):
        kernel._crew.close()
        chosen = Library(library.path, candidate.run) if candidate.run else library
        kernel._crew = Crew(chosen, candidate.threads or crew_size(torch.get_num_threads()))
    gradients = [weight.grad for weight in weights]
    times, spent = [], []
    for _ in range(UNTIMED_STEPS + steps):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        engine.ring.spent = Spent()
        began = time.perf_counter()
        made.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        spent.append(asdict(engine.ring.spent))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    figures: dict[str, Any] = {"first_s": times[0], "step_s": statistics.median(times[UNTIMED_STEPS:])}
    for key in spent[0]:
        figures[f"{key}_s"] = statistics.median(seconds[key] for seconds in spent[UNTIMED_STEPS:])
    figures["reserved"], figures["pinned"], figures["compiled"] = made.host_bytes, made.pinned, made.compiled
    made.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--seconds", type=float, default=75, help="begin no further candidate after so many")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    layers, width = options.layers or (12 if on_gpu else 4), options.width or (4096 if on_gpu else 2048)
    count = layers * width * width
    device = "cuda" if on_gpu else "cpu"
    library = available()
    print(
        f"{count / 1e6:.0f}M parameters, {torch.cuda.get_device_name() if on_gpu else 'CPU only'}, torch "
        f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"kernel {'compiled' if library else 'of torch'}, ready after {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    alone = parts_alone(count, library)
    for name, seconds in alone.items():
        print(f"{name:28}{seconds * 1e3:8.1f} ms {seconds / alone['copy']:8.2f} x limit", flush=True)
    weights = [
        torch.nn.Parameter(torch.randn(width, width, device=device, dtype=torch.bfloat16) / 64)
        for _ in range(layers)
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight) / 1024
    heads = ("step ms", "x limit", "arriving", "leaving", "kernel", "rest", "first")
    print(f"{'':64}" + "".join(f"{head:>9}" for head in heads), flush=True)
    rows = []
    for candidate in [Candidate()] if options.quick else candidates():
        if time.perf_counter() - began > options.seconds:
            print("out of time")
            break
        name = " ".join(f"{key}={value}" for key, value in asdict(candidate).items() if value)
        try:
            row = stepping(candidate, weights, options.steps, library)
        except Exception as error:
            print(f"{name:64} {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(asdict(candidate) | row)
        waited = [row[f"{key}_s"] for key in ("arriving", "leaving", "computing")]
        figures = [row["step_s"], *waited, row["step_s"] - sum(waited), row["first_s"]]
        told = [f"{figure * 1e3:9.1f}" for figure in figures]
        told.insert(1, f"{row['step_s'] / alone['copy']:9.2f}")
        print(f"{name:64}" + "".join(told), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"parameters": count, "alone": alone, "steps": rows}, indent=2))


if __name__ == "__main__":
    main()
