"""The path of a rank's record: `DIR/<run id>/<restart>/rank-00000.jsonl`, from the environment alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memtriage.process.stdlib import time

DIRECTORY_VARIABLE = "MEMTRIAGE_DIR"


DEFAULT_DIRECTORY = "memtriage-run"


RECORD_GLOB: Final = "rank-*.jsonl"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME: Final = 200  # file systems end at 255 bytes a name


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which process of which run this is.

    Attributes:
        run_id: the same on every rank of a run; safe as a directory name.
        restart: how often the launcher has restarted the run.
        rank: None for a single process that is no rank.
        world_size: number of ranks; 1 for a single process.
        local_rank: rank on this machine; None when unknown.
    """

    run_id: str
    restart: int
    rank: int | None
    world_size: int
    local_rank: int | None


def identify(env: Mapping[str, str], *, pid: int, time_s: float) -> RankIdentity:
    """Return the identity of a process from its environment.

    `RANK` and `WORLD_SIZE` (torchrun, accelerate, deepspeed) decide; without them a Slurm or Open MPI
    task counts as a rank when its job step has more than one. Malformed values count as absent.

    Args:
        env: environment variables.
        pid: process id, part of the run id of a single process.
        time_s: Unix time of the start, likewise.
    """
    ranked = _from_launcher(env) or _from_slurm(env) or _from_mpi(env)
    if ranked is not None:
        return ranked
    started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time_s))
    return RankIdentity(run_id=f"{started}-{pid}", restart=0, rank=None, world_size=1, local_rank=None)


def record_path(directory: Path, identity: RankIdentity) -> Path:
    """Return the file that this rank writes below `directory`."""
    name = f"rank-{identity.rank or 0:05d}.jsonl"
    return directory / identity.run_id / str(identity.restart) / name


def _from_launcher(env: Mapping[str, str]) -> RankIdentity | None:
    names = "RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"
    return _ranked(env, names, _number(env, "WORLD_SIZE"), "ranks")


def _from_slurm(env: Mapping[str, str]) -> RankIdentity | None:
    world_size = _number(env, "SLURM_STEP_NUM_TASKS") or _number(env, "SLURM_NTASKS")
    step = _number(env, "SLURM_STEP_ID")
    if step is None:
        step = _number(env, "SLURM_STEPID")
    if step is None and _number(env, "SLURM_PROCID") == 0:
        # The shell of a batch script is task 0 of a job of many tasks and yet alone: srun starts the
        # others, and only what srun starts has a step id.
        return None
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or "job"
    names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_RESTART_COUNT"
    return _ranked(env, names, world_size, f"slurm-{job}" if step is None else f"slurm-{job}.{step}", 2)


def _from_mpi(env: Mapping[str, str]) -> RankIdentity | None:
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "job"
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", ""
    return _ranked(env, names, _number(env, "OMPI_COMM_WORLD_SIZE"), f"mpi-{job}", 2)


def _ranked(
    env: Mapping[str, str], names: tuple[str, str, str], world_size: int | None, job: str, least: int = 1
) -> RankIdentity | None:
    """Return the identity of a rank among at least `least`.

    Args:
        env: environment variables.
        names: those of the rank, the rank on this machine, and the number of restarts.
        world_size: number of ranks; None when unknown.
        job: names the run where nothing else does.
        least: fewer ranks count as none.
    """
    rank, local_rank, restart = (_number(env, name) for name in names)
    if rank is None or world_size is None or world_size < least or rank >= world_size:
        return None
    return RankIdentity(_run_id(env, job), restart or 0, rank, world_size, local_rank)


def _run_id(env: Mapping[str, str], fallback: str) -> str:
    """Return a name that all ranks agree on.

    torchrun without `--rdzv-id` calls every run `none`; the rendezvous address is at least this machine's.
    """
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    if elastic and elastic != "none":
        return _safe(elastic)
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if address and port:
        return _safe(f"{address}-{port}")
    return _safe(fallback)


def _safe(name: str) -> str:
    """Return `name` as one path component that is neither hidden nor a way out of its directory."""
    return _UNSAFE.sub("_", name).lstrip(".")[:_LONGEST_NAME] or "run"


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number of at least 0; None when absent or malformed."""
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
