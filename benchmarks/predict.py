"""Predicted against measured: the peaks of the workloads that a GPU measured, one process a workload.

    python benchmarks/predict.py [--compiled | --graphs] [--families] [--workers N] [NAME...]

With `--families` the workloads are those that were predicted before anybody had measured them, with
`--compiled` those that were measured under `torch.compile`, which needs torch 2.11 and Triton, with
`--graphs` those of both kinds that were measured with CUDA graphs (`mode="reduce-overhead"`). Prints, for
every workload, predicted and measured peaks of the second step, signed errors, seconds and the process's
highest resident memory. Needs transformers and peft, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import groundtruth

MEASURED_WITH = "2.11.0"
STEADY = 1
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads; all by default")
    parser.add_argument("--families", action="store_true", help="the workloads of other families")
    parser.add_argument("--compiled", action="store_true", help="workloads under torch.compile")
    parser.add_argument("--graphs", action="store_true", help="workloads with CUDA graphs")
    parser.add_argument("--workers", type=int, default=1, help="how many are predicted at the same time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = [kind for kind in ("graphs", "compiled", "families") if getattr(options, kind)]
    kind = "_".join(kinds) or "measured"
    if options.one:
        mode = "reduce-overhead" if options.graphs else None
        compiled = options.compiled or options.graphs
        print(json.dumps(_one(options.one, compiled, mode, groundtruth.gpu(kind))))
        return 0
    measured = groundtruth.measured(kind)
    print(
        f"{'workload':<18}{'allocated':>10}{'error':>9}{'reserved':>11}{'error':>9}{'seconds':>9}{'MiB':>7}"
    )

    def predicted(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, __file__, "--one", name]
        command += [f"--{kind}" for kind in kinds]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    errors: list[tuple[float, float]] = []
    names = options.names or list(measured)
    with ThreadPoolExecutor(options.workers) as pool:
        for name, run in zip(names, pool.map(predicted, names), strict=True):
            if run.returncode:
                print(f"{name:<18}failed: {run.stderr.strip().splitlines()[-1]}")
                continue
            report = json.loads(run.stdout.splitlines()[-1])
            truth = measured[name]["steps"][STEADY]
            error = (
                report["peak_allocated"] / truth["peak_alloc"] - 1,
                report["peak_reserved"] / truth["peak_reserved"] - 1,
            )
            errors.append(error)
            print(
                f"{name:<18}{report['peak_allocated'] / MIB:>10,.0f}{error[0]:>+9.2%}"
                f"{report['peak_reserved'] / MIB:>11,.0f}{error[1]:>+9.2%}"
                f"{report['seconds']:>9.1f}{report['resident'] / MIB:>7,.0f}",
                flush=True,
            )
    for place, what in enumerate(("allocated", "reserved") if errors else ()):
        sizes = [abs(error[place]) for error in errors]
        print(f"{what}: median error {statistics.median(sizes):.2%}, worst {max(sizes):.2%}, of {len(sizes)}")
    return 0


def _one(name: str, compiled: bool, mode: str | None, gpu: str) -> dict[str, Any]:
    import memtriage

    build = groundtruth.workload(name, compiled=compiled, mode=mode)
    prediction = memtriage.predict(build, gpu=gpu, torch_version=MEASURED_WITH)
    return {
        "peak_allocated": prediction.peak_allocated,
        "peak_reserved": prediction.peak_reserved,
        "seconds": prediction.seconds,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
