"""Predicted against measured: the peaks of the workloads that an H200 measured, one process a workload.

    python benchmarks/predict.py [--families | --compiled] [NAME...]

With `--families` the workloads are those that were predicted before anybody had measured them, with
`--compiled` those that were measured under `torch.compile`, which needs torch 2.11 and Triton. Prints, for
every workload, predicted and measured peaks of the second step, signed errors, seconds and the process's
highest resident memory. Needs transformers and peft, and no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

GROUND_TRUTH = Path(__file__).parent.parent / "tests" / "data" / "groundtruth"
MEASURED_WITH = "2.11.0"
STEADY = 1
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads; all by default")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--families", action="store_true", help="the workloads of other families")
    kinds.add_argument("--compiled", action="store_true", help="workloads under torch.compile")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_one(options.one, options.families, options.compiled)))
        return 0
    kind = "families" if options.families else "compiled" if options.compiled else "measured"
    truths = GROUND_TRUTH / f"{kind}_h200.json"
    measured = {load["name"]: load for load in json.loads(truths.read_text())}
    print(
        f"{'workload':<18}{'allocated':>10}{'error':>9}{'reserved':>11}{'error':>9}{'seconds':>9}{'MiB':>7}"
    )
    errors: list[tuple[float, float]] = []
    for name in options.names or list(measured):
        command = [sys.executable, __file__, "--one", name]
        command += [f"--{kind}"] if kind != "measured" else []
        run = subprocess.run(command, capture_output=True, text=True)
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
            f"{report['seconds']:>9.1f}{report['resident'] / MIB:>7,.0f}"
        )
    for place, what in enumerate(("allocated", "reserved") if errors else ()):
        sizes = [abs(error[place]) for error in errors]
        print(f"{what}: median error {statistics.median(sizes):.2%}, worst {max(sizes):.2%}, of {len(sizes)}")
    return 0


def _one(name: str, families: bool, compiled: bool) -> dict[str, Any]:
    import torch

    import memtriage

    file = "families.py" if families else "workloads.py"
    specification = importlib.util.spec_from_file_location("workloads", GROUND_TRUTH / file)
    assert specification is not None and specification.loader is not None
    workloads = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(workloads)
    specs = workloads.SPECS if families else json.loads((GROUND_TRUTH / "specs.json").read_text())
    spec = next(spec for spec in specs if spec["name"] == name)

    def build(device: torch.device) -> Any:
        if not compiled:
            return workloads.build(spec, device)
        torch.set_float32_matmul_precision("high")
        model, optimizer, step = workloads.build(spec, device)
        model.compile(**({} if isinstance(spec.get("seq"), list) else {"dynamic": False}))
        return model, optimizer, step

    prediction = memtriage.predict(build, torch_version=MEASURED_WITH)
    return {
        "peak_allocated": prediction.peak_allocated,
        "peak_reserved": prediction.peak_reserved,
        "seconds": prediction.seconds,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
