"""Limits: host memory, control group, shared memory, address space, locked memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from memtriage.model.machine import Fact
from memtriage.model.units import GIB, size
from memtriage.observe.cgroup import cgroup_memory, host_limit, physical_memory, resource_limit
from memtriage.observe.host import dev_shm


@dataclass(frozen=True, slots=True)
class LimitPolicy:
    """Below which bytes a limit is too tight for training.

    Attributes:
        shared_memory: of /dev/shm. Docker gives 64 MiB, which one batch of images can exceed.
        locked: that a process may lock. Linux allows 8 MiB by default (64 KiB before 5.16); pinned buffers of
            offloaded training take gigabytes.
    """

    shared_memory: int = GIB
    locked: int = GIB


POLICY: Final = LimitPolicy()


def limits() -> Iterator[Fact]:
    """Read and judge the limits of host memory, shared memory and the process."""
    least = host_limit()
    yield Fact(section="limits", name="host memory", value=f"{size(least.bytes)} ({least.source})")
    yield Fact(section="limits", name="MemTotal", value=size(physical_memory().bytes))
    group = cgroup_memory()
    if group is None:
        yield Fact(section="limits", name="cgroup", value="no memory controller")
    else:
        limit = "no limit" if group.limit is None else f"limit {size(group.limit)}"
        yield Fact(
            section="limits", name=f"cgroup v{group.version}", value=f"{limit}, {size(group.usage)} in use"
        )
        if group.oom_kill:
            yield Fact(
                section="limits",
                name="killed for memory",
                value=f"{group.oom_kill} processes of this cgroup so far",
                status="note",
                advice="Something here ran out of host memory before: see the kernel log.",
            )
    shm = dev_shm()
    yield shared_memory(None if shm is None else shm.total, None if shm is None else shm.used)
    yield from resource_limits(resource_limit("RLIMIT_AS"), resource_limit("RLIMIT_MEMLOCK"))


def shared_memory(total: int | None, used: int | None) -> Fact:
    """Judge the size of /dev/shm, through which DataLoader workers hand over batches."""
    if total is None:
        return Fact(section="limits", name="/dev/shm", value="none")
    small = total < POLICY.shared_memory
    return Fact(
        section="limits",
        name="/dev/shm",
        value=f"{size(total)}, {size(used)} in use",
        status="bad" if small else "ok",
        advice="Too small for DataLoader workers: a full one is a bus error. Start the container with "
        "--shm-size or --ipc=host."
        if small
        else None,
    )


def resource_limits(address_space: int | None, locked: int | None) -> Iterator[Fact]:
    """Judge RLIMIT_AS and RLIMIT_MEMLOCK; None is no limit."""
    yield Fact(
        section="limits",
        name="RLIMIT_AS",
        value="no limit" if address_space is None else size(address_space),
        status="ok" if address_space is None else "bad",
        advice=None
        if address_space is None
        else "It limits address space, of which CUDA reserves far more than it uses: ulimit -v unlimited.",
    )
    tight = locked is not None and locked < POLICY.locked
    yield Fact(
        section="limits",
        name="RLIMIT_MEMLOCK",
        value="no limit" if locked is None else size(locked),
        status="note" if tight else "ok",
        advice="Memory that a program locks itself (mlock: DeepSpeed's native pinning, RDMA) stops here: "
        "ulimit -l unlimited."
        if tight
        else None,
    )
