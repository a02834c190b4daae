"""What a trial runs: its command line and its environment."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from memtriage.model.trials import PHASE_VARIABLE
from memtriage.prove.table import TrialsError
from memtriage.prove.trials import Trials, Variant

TRIAL_VARIABLE: Final = "MEMTRIAGE_TRIAL"
"""Environment of every process of a trial: its folder. By it they are found when they are to be stopped."""

_NEW_CONF: Final = "PYTORCH_ALLOC_CONF"
_OLD_CONF: Final = "PYTORCH_CUDA_ALLOC_CONF"
_NEW_CONF_SINCE: Final = (2, 10)
"""pytorch #183387: 2.9 does not take every option for CUDA from the new name."""
_OF_A_LAUNCHER: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MEMTRIAGE_DIR"),
)
"""What would make a trial take itself for a rank of the job that compares."""
_ASK_VERSION: Final = "from importlib.metadata import version; print(version('torch'))"
_ASK_TIMEOUT_S: Final = 60.0


def command(trials: Trials, variant: Variant, folder: Path) -> list[str]:
    """Return a trial's command line; its records go below `folder`."""
    python = trials.python or sys.executable
    watched = ["-m", "memtriage", "run", "-o", str(record_directory(folder))]
    if variant.host_tuning:
        watched.append("--host-tuning")
    watched += [str(trials.script)] if trials.script is not None else ["-m", trials.module or ""]
    watched += variant.args
    if trials.ranks == 1:
        return [python, *watched]
    # Standalone: a free port for each trial. Tee: whole lines, each with its rank, also in files a rank.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trials.ranks)]
    return [python, *launcher, "--tee", "3", "--log-dir", str(folder / "ranks"), *watched]


def record_directory(folder: Path) -> Path:
    """Return where a trial's records are."""
    return folder / "record"


def environment(
    variant: Variant, base: Mapping[str, str], folder: Path, torch: tuple[int, int] | None
) -> dict[str, str]:
    """Return a trial's environment.

    Args:
        torch: version of the trial's torch, which decides by which name it reads the allocator's settings.
    """
    made = {name: value for name, value in base.items() if name not in _OF_A_LAUNCHER}
    made["PYTHONUNBUFFERED"] = "1"  # lines of a trial that is killed are in its log
    if variant.allocator is not None:
        made.pop(_OLD_CONF, None)
        made.pop(_NEW_CONF, None)
        if variant.allocator:
            new = torch is not None and torch >= _NEW_CONF_SINCE
            made[_NEW_CONF if new else _OLD_CONF] = variant.allocator
    if variant.phase is not None:
        made[PHASE_VARIABLE] = "on" if variant.phase else "off"
    for name, value in variant.env.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    made[TRIAL_VARIABLE] = str(folder)
    return made


def torch_version(python: str | None) -> tuple[int, int] | None:
    """Return major and minor version of an interpreter's torch; None where it has none.

    Args:
        python: the interpreter; None for this one, which is not asked by a process.

    Raises:
        TrialsError: the interpreter cannot be started.
    """
    if python is None:
        try:
            text = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return None
    else:
        try:
            asked = subprocess.run(
                [python, "-c", _ASK_VERSION], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TrialsError(
                f"python = {python!r} in [trials] cannot be started ({error}); expected an interpreter "
                f"that has torch and memtriage: correct it"
            ) from error
        text = asked.stdout
    match = re.match(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))
