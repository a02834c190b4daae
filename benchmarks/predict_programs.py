"""Predicted against measured: public training programs, unchanged, at real sizes.

    python benchmarks/predict_programs.py data DIRECTORY
    python benchmarks/predict_programs.py predict DIRECTORY --json predicted.json
    python benchmarks/predict_programs.py measure DIRECTORY --json measured.json
    python benchmarks/predict_programs.py table predicted.json measured.json

`predict_programs.toml` lists the programs. DIRECTORY has the checkout of each repository, in the folder
that the list gives. `data` writes made-up data of the right sizes into it, `predict` runs `memtriage
predict` on each program with the GPUs hidden, and `measure` runs each program on the GPU. Both trace the same
number of steps, and the peak is the highest after the first. Names after DIRECTORY select programs.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
MEASURED_WITH: Final = "2.11.0"
LIMIT_S: Final = {"predict": 400, "measure": 150}
"""A program that takes longer is stopped and shown as failed."""
BACKWARD: Final = 0
"""Stands for the end of a backward pass where an optimizer is named by its `id`."""
BACKWARDS_WITHOUT_OPTIMIZER: Final = 48
"""Gradients are not accumulated over more backward passes than this: then no optimizer is going to step."""
PEAKS: Final = ("peak_allocated", "peak_reserved")
MIB: Final = 1 << 20


def main() -> int:
    if sys.argv[1:2] == ["launch"]:
        _launch(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("data", "predict", "measure", "table"))
    parser.add_argument("path", type=Path, help="the checkouts' folder; for table the predictions")
    parser.add_argument("names", nargs="*", help="programs; all by default. For table the measurements")
    parser.add_argument("--list", type=Path, default=HERE / "predict_programs.toml", help="another list")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    options = parser.parse_intermixed_args()
    listed = tomllib.loads(options.list.read_text())
    if options.mode == "table":
        predicted, measured = (json.loads(each.read_text()) for each in (options.path, Path(*options.names)))
        print(_table(listed["program"], predicted, measured))
        return 0
    unknown = set(options.names) - {each["name"] for each in listed["program"]}
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}; expected names of {options.list}")
    programs = [each for each in listed["program"] if not options.names or each["name"] in options.names]
    directory = options.path.resolve()
    if options.mode == "data":
        _write_data(programs, directory)
        return 0
    run = _predicted if options.mode == "predict" else _measured
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(run, program, directory, listed["steps"]): program["name"] for program in programs
        }
        for done in as_completed(running):
            results[running[done]] = done.result()
            print(f"{running[done]:<28}{_line(done.result())}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    return 0


def _write_data(programs: list[dict[str, Any]], directory: Path) -> None:
    from program_data import KINDS

    for program in programs:
        for place, kind in program.get("data", {}).items():
            path = directory / program["folder"] / place
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                KINDS[kind](path)


def _predicted(program: dict[str, Any], directory: Path, steps: int) -> dict[str, Any]:
    options = ["--json", "--steps", str(steps), "--torch-version", MEASURED_WITH]
    command = ["-P", "-m", "memtriage", "predict", _script(program), *options, "--", *_arguments(program)]
    # What the program prints goes to stderr, the result alone to stdout.
    result = _run(command, program, directory, "predict", {"CUDA_VISIBLE_DEVICES": ""})
    if "failed" in result:
        return result
    prediction = json.loads(result["printed"].splitlines()[-1])
    peaks = [
        {kind: step[kind] for kind in ("peak_allocated", "peak_reserved")} for step in prediction["steps"]
    ]
    return {
        "steps": peaks,
        "seconds": result["seconds"],
        "notes": prediction["notes"],
        "trials_bound": prediction.get("cudnn_trials_bound"),
    }


def _measured(program: dict[str, Any], directory: Path, steps: int) -> dict[str, Any]:
    record = directory / f"{program['name'].replace(' ', '-')}.json"
    record.unlink(missing_ok=True)
    command = ["-P", __file__, "launch", str(record), str(steps), _script(program), *_arguments(program)]
    result = _run(command, program, directory, "measure", {})
    if not record.exists():
        return {"failed": result.get("failed", "it ended without a step"), "seconds": result["seconds"]}
    return {"seconds": result["seconds"], **json.loads(record.read_text())}


def _script(program: dict[str, Any]) -> str:
    """The program's path, from the folder that it is started in."""
    return os.path.relpath(program["path"], program.get("start", "."))


def _arguments(program: dict[str, Any]) -> list[str]:
    return shlex.split(program.get("arguments", ""))


def _run(
    arguments: list[str], program: dict[str, Any], directory: Path, mode: str, settings: dict[str, str]
) -> dict[str, Any]:
    """Run Python in the program's folder, and end whatever it leaves running."""
    folder = directory / program["folder"] / program.get("start", ".")
    environment = {**os.environ, **settings}
    for name, value in program.get("environment", {}).items():
        environment[name] = value.format(directory=directory)
        if name == "PYTHONPATH" and "PYTHONPATH" in os.environ:
            environment[name] += os.pathsep + os.environ["PYTHONPATH"]
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    failed = ""
    try:
        printed, complaints = process.communicate(timeout=LIMIT_S[mode])
        if process.returncode:
            lines = [line for line in complaints.splitlines() if line.strip()]
            failed = lines[-1] if lines else f"status {process.returncode}"
    except subprocess.TimeoutExpired:
        printed, failed = "", f"not done after {LIMIT_S[mode]} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # DataLoader workers outlive a program that is stopped
        except ProcessLookupError:
            pass
        process.wait()
    result: dict[str, Any] = {"printed": printed, "seconds": round(time.monotonic() - begun, 1)}
    return {**result, "failed": failed} if failed else result


class _Measured(BaseException):
    """All steps are done. No `except Exception` of the program stops it."""


def _launch(record: Path, steps: int, script: str, arguments: list[str]) -> None:
    """Run a script as `__main__`, record the peaks of its first steps, and end the process."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    peaks: list[tuple[int, int, int]] = []

    def note(what: int) -> None:
        """The peaks since the last note."""
        if torch.cuda.is_initialized():
            peaks.append((what, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
            torch.cuda.reset_peak_memory_stats()
        else:
            peaks.append((what, 0, 0))

    def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if len(_by_step([*peaks, (id(optimizer), 0, 0)])) > steps:
            raise _Measured

    original = torch.autograd.backward

    def backward(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        note(BACKWARD)
        if all(what == BACKWARD for what, _, _ in peaks) and len(peaks) >= BACKWARDS_WITHOUT_OPTIMIZER:
            raise _Measured

    torch.autograd.backward = backward
    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(lambda optimizer, *_: note(id(optimizer)))
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except _Measured:
        pass
    steps_found = [{"peak_allocated": a, "peak_reserved": r} for a, r in _by_step(peaks)[:steps]]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "no GPU"
    if steps_found:
        record.write_text(json.dumps({"steps": steps_found, "gpu": gpu, "torch": torch.__version__}))
    sys.stdout.flush()
    os._exit(0)  # Not what the program would do at its end.


def _by_step(peaks: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The highest allocated and reserved bytes of each step.

    A step ends with its last optimizer, before one that has stepped in it steps again. In a program without
    optimizers every backward pass is a step.
    """
    optimizers = any(what != BACKWARD for what, _, _ in peaks)
    steps: list[tuple[int, int]] = []
    stepped: set[int] = set()
    since = (0, 0)  # the last optimizer's step
    for what, allocated, reserved in peaks:
        since = (max(since[0], allocated), max(since[1], reserved))
        if optimizers and what == BACKWARD:
            continue
        if what in stepped or not steps:
            steps.append((0, 0))
            stepped.clear()
        stepped.add(what)
        steps[-1] = (max(steps[-1][0], since[0]), max(steps[-1][1], since[1]))
        since = (0, 0)
    return steps


def _after_first(result: dict[str, Any], kind: str) -> int:
    return max(step[kind] for step in result["steps"][1:] or result["steps"])


def _line(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"failed after {result['seconds']} s: {result['failed']}"
    peaks = (f"{_after_first(result, kind) / MIB:>10,.0f}" for kind in PEAKS)
    return "".join(peaks) + f"{result['seconds']:>8.1f} s, {len(result['steps'])} steps"


def _table(programs: list[dict[str, Any]], predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    """MiB, and errors in percent of the measured; `*` where cuDNN chooses kernels.

    Where cuDNN chooses by trial: the bound of the trials, and the allocated peak of the first step.
    """
    lines = [
        f"{'program':<29}{'allocated':>10}{'measured':>10}{'error':>9}{'reserved':>11}{'measured':>10}{'error':>9}"
    ]
    for program in programs:
        name = program["name"]
        pair = predicted.get(name, {"failed": "not run"}), measured.get(name, {"failed": "not run"})
        shown = f"{name + (' *' if program.get('cudnn') else ''):<29}"
        for what, result in zip(("prediction", "measurement"), pair, strict=True):
            if "failed" in result:
                shown += f" {what} failed: {result['failed'][:80]}"
        if not any("failed" in result for result in pair):
            for kind, width in zip(PEAKS, (10, 11), strict=True):
                expected, real = (_after_first(each, kind) for each in pair)
                error = f"{expected / real - 1:+.2%}" if real else "-"
                shown += f"{expected / MIB:>{width},.0f}{real / MIB:>10,.0f}{error:>9}"
            if pair[0].get("trials_bound"):
                first = pair[1]["steps"][0]["peak_allocated"]
                shown += f"  trials: up to {pair[0]['trials_bound'] / MIB:,.0f}, measured {first / MIB:,.0f}"
        lines.append(shown)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
