"""Re-runs all cases, as far as this machine can: `make cases`, or `python cases/run_all.py`.

    --only NAME ...    cases, or parts of them (as --list names them)
    --list             what would run here, and why the rest would not; nothing runs
    --out DIR          results go there; the cases' own results and pages stay as they are
    --longest SECONDS  leave out parts that may take longer

Each part is a script of its own, within a time limit. Its results replace the former ones only when it has
come to its end; then the pages are written again. Status 1 when a part failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import measuring
import tables

CASES: Final = Path(__file__).parent
BESIDE_THE_ENVIRONMENT: Final = "deepspeed"
"""DeepSpeed's own folder next to `bin`, where `make test` installs it for its tests alone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to run on.

    Attributes:
        gpus: CUDA devices.
        transformer_engine: TransformerEngine can be imported.
        deepspeed: the folder that DeepSpeed is to be imported from; "" when it is installed, None without it.
    """

    gpus: int
    transformer_engine: bool
    deepspeed: str | None

    def __str__(self) -> str:
        has = {True: "installed", False: "not installed"}
        return (
            f"{self.gpus} GPU(s); TransformerEngine {has[self.transformer_engine]}; DeepSpeed "
            f"{has[self.deepspeed is not None]}"
        )


Why = Callable[[Machine], str | None]


def anywhere(machine: Machine) -> str | None:
    return None


def without_gpu(machine: Machine) -> str | None:
    return "there is a GPU, which the case uses" if machine.gpus else None


def gpu(machine: Machine) -> str | None:
    return None if machine.gpus else "needs a GPU"


def two_gpus(machine: Machine) -> str | None:
    return None if machine.gpus > 1 else f"needs two GPUs; there are {machine.gpus}"


def engine(machine: Machine) -> str | None:
    missing = "TransformerEngine is not installed: pip install 'transformer_engine[pytorch]'"
    return gpu(machine) or (None if machine.transformer_engine else missing)


def two_with_engine(machine: Machine) -> str | None:
    return two_gpus(machine) or engine(machine)


def no_engine(machine: Machine) -> str | None:
    both = machine.gpus and machine.transformer_engine
    return "there are a GPU and TransformerEngine, which the case uses" if both else None


def deepspeed(machine: Machine) -> str | None:
    missing = (
        "DeepSpeed is not installed: pip install --no-deps -r cases/deepspeed_zero2_offload/requirements.txt"
    )
    return None if machine.deepspeed is not None else missing


def gpu_and_deepspeed(machine: Machine) -> str | None:
    return gpu(machine) or deepspeed(machine)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a case.

    Attributes:
        case: its folder.
        name: of the part.
        command: a script of the case and its arguments; `--out FILE` is added.
        result: the file in the case's `results`.
        unable: why it cannot run on a machine; None when it can.
        limit_s: seconds that it may take.
        on_cpu: hide the GPUs from it.
        wrap: the script writes its figures bare: date, device and versions go around them, under this name.
    """

    case: str
    name: str
    command: tuple[str, ...]
    result: str
    unable: Why
    limit_s: float
    on_cpu: bool = False
    wrap: str | None = None

    def __str__(self) -> str:
        return f"{self.case}/{self.name}"


PARTS: Final = (
    Part("loss_retention", "gpu", ("measure.py",), "gpu.json", gpu, 400),
    Part("loss_retention", "cpu", ("measure.py",), "cpu.json", without_gpu, 400),
    Part("fused_attention_ctx", "gpu", ("measure.py",), "gpu.json", engine, 400),
    Part("fused_attention_ctx", "fsdp", ("measure.py", "--ranks", "2"), "gpus.json", two_with_engine, 400),
    Part("fused_attention_ctx", "cpu", ("measure.py",), "cpu.json", no_engine, 300, on_cpu=True),
    Part("fp8_refit", "simulate", ("measure.py", "simulate"), "cpu.json", anywhere, 400, on_cpu=True),
    Part("fp8_refit", "segments", ("measure.py", "segments"), "segment_cost.json", gpu, 300),
    Part("fp8_refit", "who", ("measure.py", "who"), "who.json", engine, 900),
    Part("playbook", "gpu", ("run.py", "--device", "cuda"), "h200.json", gpu, 1800),
    Part("playbook", "cpu", ("run.py", "--device", "cpu"), "cpu.json", without_gpu, 1200),
    Part("deepspeed_zero2_offload", "cpu", ("run.py", "--cpu"), "cpu.json", deepspeed, 1500, True, "jobs"),
    Part("deepspeed_zero2_offload", "gpu", ("run.py",), "h200.json", gpu_and_deepspeed, 1500, False, "jobs"),
    Part("fp8_refit", "trials", ("measure.py", "trials"), "two_gpus.json", two_with_engine, 7200),
)
"""Quick ones first."""


def this_machine() -> Machine:
    import torch

    folder = Path(sys.prefix) / BESIDE_THE_ENVIRONMENT
    installed = importlib.util.find_spec("deepspeed") is not None
    beside = str(folder) if (folder / "deepspeed").is_dir() else None
    return Machine(
        torch.cuda.device_count(),
        importlib.util.find_spec("transformer_engine") is not None,
        "" if installed else beside,
    )


@dataclass(slots=True)
class Tally:
    """What became of the parts."""

    ran: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def chosen(parts: tuple[Part, ...], only: list[str]) -> list[Part]:
    """The parts that are asked for.

    Raises:
        ValueError: a name that is no case's and no part's.
    """
    known = {part.case for part in parts} | {str(part) for part in parts}
    wrong = [name for name in only if name not in known]
    if wrong:
        raise ValueError(f"no such case: {', '.join(wrong)}; there are {', '.join(sorted(known))}")
    return [part for part in parts if not only or part.case in only or str(part) in only]


def perform(part: Part, machine: Machine, out: Path) -> str | None:
    """Runs a part, what it prints shown as it comes; why it failed, else None."""
    environment = dict(os.environ)
    if part.on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if part.case.startswith("deepspeed") and machine.deepspeed:
        environment["PYTHONPATH"] = os.pathsep.join([machine.deepspeed, environment.get("PYTHONPATH", "")])
    script, *rest = part.command
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        process = subprocess.Popen(
            [sys.executable, str(CASES / part.case / script), *rest, "--out", str(file)],
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            return f"not done after {part.limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status or not file.exists():
            return f"exit status {status}"
        report: dict[str, Any] = json.loads(file.read_text())
        if part.wrap is not None:
            report = {"about": measuring.about("deepspeed"), part.wrap: report}
        measuring.write(out, report)
    return None


def pages(cases: list[str]) -> list[str]:
    """Writes the pages of these cases again; what went wrong."""
    wrong = []
    for case in cases:
        try:
            if case in tables.cases():
                tables.update(case)
            elif (CASES / case / "table.py").exists():
                subprocess.run([sys.executable, str(CASES / case / "table.py")], check=True, cwd=CASES / case)
            print(f"cases/{case}/README.md is written", flush=True)
        except (ValueError, KeyError, OSError, subprocess.CalledProcessError) as error:
            wrong.append(f"page of {case}: {type(error).__name__}: {error}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--longest", type=float, metavar="SECONDS")
    options = parser.parse_args()
    try:
        parts = chosen(PARTS, options.only)
    except ValueError as error:
        parser.error(str(error))
    machine = this_machine()
    if machine.deepspeed:
        sys.path.append(machine.deepspeed)  # for its version
    print(f"{machine}\n", flush=True)
    tally = Tally()
    for number, part in enumerate(parts, 1):
        unable = part.unable(machine)
        if unable is None and options.longest is not None and part.limit_s > options.longest:
            unable = f"may take {part.limit_s:.0f} s"
        head = f"[{number}/{len(parts)}] {part}"
        if unable is not None or options.list:
            print(f"{head}: {'would run' if unable is None else unable}", flush=True)
            tally.left_out += [] if unable is None else [f"{part}: {unable}"]
            continue
        print(f"{head}: {' '.join(part.command)}, at most {part.limit_s:.0f} s", flush=True)
        began = time.monotonic()
        folder = CASES / part.case / "results" if options.out is None else options.out / part.case
        try:
            why = perform(part, machine, folder / part.result)
        except (OSError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{head}: {'done' if why is None else why} ({took})\n", flush=True)
        if why is None:
            tally.ran.append(str(part))
        else:
            tally.failed.append(f"{part}: {why}")
    if options.list:
        return 0
    if options.out is None:
        tally.failed += pages(list(dict.fromkeys(name.partition("/")[0] for name in tally.ran)))
    for title, lines in (("ran", tally.ran), ("left out", tally.left_out), ("failed", tally.failed)):
        print("\n".join([f"{title}: {len(lines)}", *(f"  {line}" for line in lines)]))
    return int(bool(tally.failed))


if __name__ == "__main__":
    sys.exit(main())
