"""The processes of this node that belong to one job, according to the kernel."""

from __future__ import annotations

from pathlib import Path

from memtriage.observe.process_tree import parent_of


def ranks_of(pid: int) -> list[int]:
    """Return the processes of this node that are ranks of the same job as a process, or below it.

    Ranks are recognized by their environment, as torchrun and other launchers set it. Workers of a rank
    inherit it, and do not count.
    """
    job = _job_of(pid)
    members: dict[int, int] = {}  # process, its parent
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            other = int(folder.name)
            of_job = _job_of(other)
            if of_job is not None and (of_job == job if job is not None else _is_below(other, pid)):
                members[other] = parent_of(other) or 0
    ranks = [member for member, parent in members.items() if parent not in members]
    return sorted(ranks, key=lambda member: (rank_of(member) or 0, member)) or [pid]


def environment_of(pid: int) -> dict[bytes, bytes]:
    """Return the environment with which a process was started; empty if it may not be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(part.split(b"=", 1) for part in raw.split(b"\0") if b"=" in part)


def _job_of(pid: int) -> tuple[bytes | None, ...] | None:
    """Return what identifies a job on this node; None for a process that is not a rank."""
    environment = environment_of(pid)
    if b"RANK" not in environment or b"WORLD_SIZE" not in environment:
        return None
    names = (b"MASTER_ADDR", b"MASTER_PORT", b"TORCHELASTIC_RUN_ID", b"WORLD_SIZE")
    return tuple(environment.get(name) for name in names)


def rank_of(pid: int) -> int | None:
    """Return the rank of a process; None if it has none."""
    rank = environment_of(pid).get(b"RANK", b"")
    return int(rank) if rank.isdigit() else None


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = parent_of(pid) or 0
        if pid == ancestor:
            return True
    return False
