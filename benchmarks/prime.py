"""Reserved and allocated memory of training as it is, with expandable segments and primed, on one GPU.

    python benchmarks/prime.py [--families] [--steps 40] [--long 200] [--within S] [--json FILE] [NAME...]

For each workload of `tests/data/groundtruth` the blocks are chosen by prediction in a process of its own,
without the GPU, and written down first. Then the workload runs with the default settings, with expandable
segments and primed, with the same seed. Printed are the highest reserved bytes, their ratio to the highest
allocated ones, by how much losses differ, and milliseconds per step. `--long` names how many steps six of
them make, in turns. With `--families` the workloads are those of other families, with `--unseen` those of
`prime_programs.py`. What the file of `--json` has of an earlier run is not done again. Needs transformers and
peft.

    python benchmarks/prime.py --plan NAME     the choice for one workload, as JSON; no GPU
    python benchmarks/prime.py --what-adds [NAME...]

prints, from simulation alone, what blocks save, under each of several settings and where the states of the
optimizer have a pool of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import prime_programs

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import groundtruth

MIB = 1 << 20
LONG = ("gpt2s-amp", "gpt2m-bf16-fused", "gpt2s-eager", "llama1b-sgd", "resnet50-amp", "resnet50-fp32")
"""The six with the shortest steps."""
WARM_UP = 5
MODES = ("default", "expandable", "primed")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads; all by default")
    parser.add_argument("--steps", type=int, default=40, help="steps of each workload")
    parser.add_argument("--long", type=int, default=0, help="steps of the six in turns")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds after which no workload begins")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--gpu", default="h200", help="kind of GPU to predict for")
    parser.add_argument("--families", action="store_true", help="the workloads of other families")
    parser.add_argument("--unseen", action="store_true", help="programs that the search was not tried on")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--plan", action="store_true", help="print the choice for one workload")
    parser.add_argument("--what-adds", action="store_true", help="compare settings and a pool, without a GPU")
    options = parser.parse_args()
    if options.what_adds:
        return what_adds(options.names or _names(options), options.gpu)
    if options.plan:
        print(_plan(options.names[0], options.gpu))
        return 0
    return Benchmark(options).run()


def _names(options: argparse.Namespace) -> list[str]:
    if options.unseen:
        return list(prime_programs.PROGRAMS)
    return list(groundtruth.measured("families" if options.families else "measured"))


def _workload(name: str) -> Callable[[Any], Any]:
    return prime_programs.PROGRAMS.get(name) or groundtruth.workload(name)


def _plan(name: str, gpu: str) -> str:
    import msgspec

    from memtriage.planning.priming import plan_priming

    return msgspec.json.encode(plan_priming(_workload(name), gpu=gpu)).decode()


def what_adds(names: list[str], gpu: str) -> int:
    """Print what each means adds: highest reserved by highest allocated bytes of large blocks."""
    from memtriage.allocator.priming import peak_live
    from memtriage.planning.priming import STEPS, priming_of_trace
    from memtriage.prediction.gpu_kinds import machine
    from memtriage.prediction.requests import requests_of
    from memtriage.prediction.trace import trace

    kind, version = machine(gpu), (2, 11)
    print("reserved by allocated memory, without and with the best blocks that pass all checks")
    for name in names:
        traced = trace(_workload(name), kind, version, STEPS)
        requests = requests_of(traced, kind.memory)
        alive = peak_live(requests.all())
        found = [
            f"{each.name or 'as it is'} {each.before / alive:.3f} {each.after / alive:.3f}"
            for each in priming_of_trace(traced, kind).tried
        ]
        print(f"{name:<18}", "; ".join(found), flush=True)
    return 0


class Benchmark:
    """The run over all workloads.

    Attributes:
        results: by workload: the plan, and what each mode measured.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begun = time.monotonic()
        self._lock = Lock()
        self.results: dict[str, dict[str, Any]] = {}
        if options.json is not None and options.json.exists():
            self.results = json.loads(options.json.read_text())

    def run(self) -> int:
        options = self._options
        names = options.names or _names(options)
        with ThreadPoolExecutor(options.workers) as pool:
            plans = {name: pool.submit(self._planned, name) for name in names}
            for mode in ("default", "primed", "expandable"):  # choices are made while the default runs
                for name in names:
                    self._measure(name, mode, options.steps, plans[name])
            for name in names:
                self._print(name)
            for name in [name for name in names if name in LONG and options.long]:
                for mode in ("default", "primed"):
                    self._measure(name, mode, options.long, plans[name], key=f"{mode}_long")
                self._print(name, "_long")
            self._summary()
            pool.shutdown(wait=False, cancel_futures=True)
        return 0

    def _planned(self, name: str) -> Any:
        if "plan" in self.results.get(name, {}):
            return self.results[name]["plan"]
        command = [sys.executable, __file__, "--plan", "--gpu", self._options.gpu, name]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            return {"failed": done.stderr.strip().splitlines()[-1]}
        plan = json.loads(done.stdout.splitlines()[-1])
        self._keep(name, "plan", plan)
        return plan

    def _measure(self, name: str, mode: str, steps: int, plan: Future[Any], key: str = "") -> None:
        earlier = self.results.get(name, {}).get(key or mode, {"failed": ""})
        if "failed" not in earlier or time.monotonic() - self._begun > self._options.within:
            return
        chosen = plan.result() if mode == "primed" else {}
        try:
            found = measured(_workload(name), mode, steps, chosen)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        self._keep(name, key or mode, found)

    def _print(self, name: str, suffix: str = "") -> None:
        row = self.results.get(name, {})
        plan = row.get("plan", {})
        found = [f"{name:<18}"]
        for mode in MODES:
            one = row.get(mode + suffix)
            if one is None or "failed" in one:
                found.append(f"{mode} {one and one['failed']}")
                continue
            found.append(
                f"{mode} {one['reserved'] / MIB:,.0f} MiB {one['reserved'] / one['allocated']:.3f} "
                f"{one['ms']:.1f} ms"
            )
        if plan.get("allocated"):
            found.append(
                f"predicted {plan['reserved_before'] / MIB:,.0f} -> {plan['reserved_after'] / MIB:,.0f} MiB"
            )
        losses = {mode: row[mode + suffix].get("losses") for mode in MODES if mode + suffix in row}
        found += [
            f"losses of {mode} differ by at most {_difference(losses['default'], losses[mode]):.1g}"
            for mode in MODES[1:]
            if losses.get("default") and losses.get(mode)
        ]
        print("; ".join(found), flush=True)

    def _summary(self) -> None:
        import statistics

        for mode in MODES:
            ratios = [
                row[mode]["reserved"] / row[mode]["allocated"]
                for row in self.results.values()
                if "reserved" in row.get(mode, {})
            ]
            if ratios:
                median, worst = statistics.median(ratios), max(ratios)
                print(f"{mode}: median {median:.3f}, worst {worst:.3f}, of {len(ratios)}")

    def _keep(self, name: str, key: str, found: dict[str, Any]) -> None:
        with self._lock:
            self.results.setdefault(name, {})[key] = found
            if self._options.json is not None:
                self._options.json.write_text(json.dumps(self.results))


def _difference(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of two runs. Kernels that add atomically make runs differ by
    themselves, so expandable segments are the measure for primed memory."""
    return max(abs(loss - other) / max(abs(loss), 1e-9) for loss, other in zip(losses, others, strict=True))


def measured(build: Any, mode: str, steps: int, plan: dict[str, Any]) -> dict[str, Any]:
    """What a workload takes in one mode, primed as planned. Sizes are bytes."""
    import torch

    from memtriage.model.priming import StatePool
    from memtriage.treat.priming import CudaBlocks, CudaPools, StatePools, allocate

    clean = _emptied(mode, plan.get("settings", ""))
    blocks = plan.get("blocks", [])
    failure = allocate(blocks, CudaBlocks(0)) if blocks else None
    pools = StatePools([StatePool(**pool) for pool in plan.get("pools", [])], CudaPools(0))
    pools.install()
    torch.manual_seed(0)
    losses: list[float] = []
    by_step: list[int] = []
    with _losses_into(losses):
        model, optimizer, step = build(torch.device("cuda"))
        for number in range(steps):
            if number == min(WARM_UP, steps - 1):
                torch.cuda.synchronize()
                began = time.perf_counter()
            step()
            if number in (5, 39, steps - 1):
                by_step.append(torch.cuda.max_memory_reserved())
        torch.cuda.synchronize()
    spent = time.perf_counter() - began
    found = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "reserved_by_step": by_step,
        "ms": spent / max(1, steps - WARM_UP) * 1000,
        "steps": steps,
        "losses": losses,
        "before": clean,
        "not_primed": failure,
        "gpu": torch.cuda.get_device_name(),
    }
    pools.remove()
    del model, optimizer, step
    return found


def _emptied(mode: str, settings: str) -> int:
    """Leave the allocator as a new process finds it; returns the bytes that stay reserved."""
    import torch

    from memtriage.treat.priming import set_allocator

    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    set_allocator(settings, f"expandable_segments:{mode == 'expandable'}")
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


@contextmanager
def _losses_into(losses: list[float]) -> Iterator[None]:
    """Note the value of each tensor that backward is called on."""
    import torch

    original = torch.Tensor.backward

    def backward(self: Any, *arguments: Any, **options: Any) -> Any:
        losses.append(float(self.detach()))
        return original(self, *arguments, **options)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
