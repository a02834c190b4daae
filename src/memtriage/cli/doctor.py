"""`memtriage doctor`: versions, devices, limits and settings that matter for memory, with advice."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from memtriage.model.units import UNKNOWN, size
from memtriage.model.version import __version__
from memtriage.report.styles import BAD, GOOD, PLAIN_WARN

FactStatus = Literal["ok", "note", "bad"]
"""`note` is worth knowing, `bad` should be changed."""

_STYLES: Final[dict[FactStatus, str]] = {"ok": "", "note": PLAIN_WARN, "bad": BAD}
_NAMES: Final = 35  # columns of the longest name
_SMALL_SHM: Final = 1 << 30
_MEMLOCK_ENOUGH: Final = 1 << 30
_OTHER_MALLOCS: Final = ("jemalloc", "tcmalloc", "mimalloc", "tbbmalloc")


class Fact(msgspec.Struct, kw_only=True):
    """One thing that the doctor looked at.

    Attributes:
        section: versions, devices, limits, settings or capabilities.
        name: what it is.
        value: what was found, in words.
        status: ok, note or bad.
        advice: what to do, unless it is ok.
    """

    section: str
    name: str
    value: str
    status: FactStatus = "ok"
    advice: str | None = None


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False) -> int:
    """Check versions, devices, limits and settings."""
    facts = list(gather(os.environ))
    if json:
        sys.stdout.buffer.write(msgspec.json.encode({"schema": 1, "facts": facts}) + b"\n")
    else:
        _print(facts)
    return 0


def gather(env: Mapping[str, str]) -> Iterator[Fact]:
    """Look at this machine. Works without a GPU and without torch; never makes a CUDA context.

    Args:
        env: environment variables.
    """
    torch, why_not = _torch()
    yield from versions(torch, why_not)
    yield from _devices(torch)
    yield from _limits()
    yield from settings(env, None if torch is None else _release(torch.__version__))
    yield from _thp()
    if torch is not None:
        yield from _capabilities(torch)


# Versions and devices


def _torch() -> tuple[ModuleType | None, str]:
    """Return torch, or None and why it cannot be imported."""
    try:
        import torch
    except ImportError as error:
        return None, str(error)
    except OSError as error:  # a shared library of torch that cannot be loaded
        return None, f"{type(error).__name__}: {error}"
    return torch, ""


def versions(torch: ModuleType | None, why_not: str = "") -> Iterator[Fact]:
    """Tell the versions.

    Args:
        torch: the module; None when it cannot be imported.
        why_not: why it cannot be imported.
    """
    yield Fact(section="versions", name="memtriage", value=__version__)
    yield Fact(section="versions", name="python", value=f"{platform.python_version()}, {sys.executable}")
    if torch is None:
        yield Fact(
            section="versions",
            name="torch",
            value=f"not importable ({why_not})",
            status="bad",
            advice="Install memtriage into the environment that training runs in, or torch into this one.",
        )
    else:
        old = _release(torch.__version__) < (2, 8)
        yield Fact(
            section="versions",
            name="torch",
            value=str(torch.__version__),  # a TorchVersion, which is a str of its own kind
            status="bad" if old else "ok",
            advice="memtriage is made for torch 2.8 and newer." if old else None,
        )
        yield _cuda_build(torch)
    driver, supports = _driver()
    yield Fact(section="versions", name="NVIDIA driver", value=driver)
    if supports is not None:
        yield Fact(section="versions", name="CUDA of driver", value=supports)


def _cuda_build(torch: ModuleType) -> Fact:
    built = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    if built is None:
        return Fact(section="versions", name="CUDA of torch", value="none: a CPU build of torch")
    return Fact(section="versions", name="CUDA of torch", value=built)


def _driver() -> tuple[str, str | None]:
    """Return the NVIDIA driver's version, or why there is none, and the CUDA version that it supports."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return "unknown: nvidia-ml-py is not installed", None
    except pynvml.NVMLError as error:
        return f"none ({error})", None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return _text(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
    except pynvml.NVMLError as error:
        return f"unknown ({error})", None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _devices(torch: ModuleType | None) -> Iterator[Fact]:
    if torch is None:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    yield from other_accelerators(torch)
    if not available:
        built = torch.version.cuda is not None or torch.version.hip is not None
        said = f": {caught[0].message}" if caught else ""
        yield Fact(
            section="devices",
            name="GPU",
            value=f"none that torch can use{said}",
            status="bad" if built and caught else "note",
            advice="Check the driver, CUDA_VISIBLE_DEVICES and the container's device access."
            if built
            else "This torch is built for CPU only; memtriage watches CPU tensors and the process.",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        yield Fact(
            section="devices",
            name=f"cuda:{index}",
            value=f"{properties.name}, {size(properties.total_memory)}, {capability}",
        )


def other_accelerators(torch: ModuleType) -> Iterator[Fact]:
    """Name accelerators whose memory memtriage does not count, or was never tried on."""
    if torch.version.hip is not None:
        yield Fact(
            section="devices",
            name="ROCm",
            value="never tried",
            status="note",
            advice="Counters and holders may work: they come from torch.cuda. The driver's figures are "
            "missing: they come from NVML.",
        )
    for name, module in (("XPU", getattr(torch, "xpu", None)), ("MPS", getattr(torch.backends, "mps", None))):
        if module is not None and module.is_available():
            yield Fact(
                section="devices",
                name=name,
                value="its memory is not counted",
                status="note",
                advice="memtriage counts CUDA devices, CPU tensors and the host. A census still lists "
                f"tensors on {name}.",
            )


# Limits


def _limits() -> Iterator[Fact]:
    from memtriage.observe.cgroup import cgroup_memory, host_limit
    from memtriage.observe.host import dev_shm

    least = host_limit()
    yield Fact(section="limits", name="host memory", value=f"{size(least.bytes)} ({least.source})")
    total = _mem_total()
    yield Fact(section="limits", name="MemTotal", value=size(total))
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
    yield from resource_limits(_rlimit("RLIMIT_AS"), _rlimit("RLIMIT_MEMLOCK"))


def shared_memory(total: int | None, used: int | None) -> Fact:
    """Judge the size of /dev/shm, through which DataLoader workers hand over batches."""
    if total is None:
        return Fact(section="limits", name="/dev/shm", value="none")
    small = total < _SMALL_SHM
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
    tight = locked is not None and locked < _MEMLOCK_ENOUGH
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


def _rlimit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _mem_total() -> int | None:
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1]) << 10


# Settings


def settings(env: Mapping[str, str], torch: tuple[int, int] | None) -> Iterator[Fact]:
    """Judge environment variables and the collector.

    Args:
        env: environment variables.
        torch: release of torch; None without torch.
    """
    yield from _allocator_settings(env, torch)
    yield _flag(env, "CUDA_LAUNCH_BLOCKING", "Every kernel launch waits for its end: unset it to train.")
    yield _caching(env)
    yield _record_streams(env)
    for name in ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        yield _shown(env, name)
    yield _preload(env)
    yield _shown(env, "CUDA_VISIBLE_DEVICES")
    yield Fact(
        section="settings",
        name="gc",
        value="enabled" if gc.isenabled() else "disabled",
        status="ok" if gc.isenabled() else "note",
        advice=None if gc.isenabled() else "Garbage cycles stay until gc.collect(): call it now and then.",
    )


def _allocator_settings(env: Mapping[str, str], torch: tuple[int, int] | None) -> Iterator[Fact]:
    old, new = env.get("PYTORCH_CUDA_ALLOC_CONF"), env.get("PYTORCH_ALLOC_CONF")
    clash = old is not None and new is not None and old != new
    yield Fact(
        section="settings",
        name="PYTORCH_CUDA_ALLOC_CONF",
        value=old or "not set",
        status="bad" if clash else "ok",
        advice="PYTORCH_ALLOC_CONF says something else, and which of them counts differs by torch release: "
        "set one."
        if clash
        else None,
    )
    # pytorch #183387: 2.9.1 does not take expandable_segments for CUDA from the new name.
    unread = new is not None and old is None and torch is not None and torch < (2, 10)
    yield Fact(
        section="settings",
        name="PYTORCH_ALLOC_CONF",
        value=new or "not set",
        status="bad" if clash else "note" if unread else "ok",
        advice="See PYTORCH_CUDA_ALLOC_CONF."
        if clash
        else "torch before 2.10 may ignore this name for CUDA: use PYTORCH_CUDA_ALLOC_CONF."
        if unread
        else None,
    )


def _caching(env: Mapping[str, str]) -> Fact:
    value = env.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
    return Fact(
        section="settings",
        name="PYTORCH_NO_CUDA_MEMORY_CACHING",
        value="not set" if value is None else value,
        status="ok" if value is None else "bad",
        advice=None
        if value is None
        else "The caching allocator is off: slow, and its counters say nothing. Unset it (torch asks whether "
        "it is set, not for its value).",
    )


def _record_streams(env: Mapping[str, str]) -> Fact:
    value = env.get("TORCH_NCCL_AVOID_RECORD_STREAMS")
    return Fact(
        section="settings",
        name="TORCH_NCCL_AVOID_RECORD_STREAMS",
        value=value or "not set",
        status="note" if value else "ok",
        advice="Without effect: torch 2.8 and newer never record streams for collectives. It can go."
        if value
        else None,
    )


def _preload(env: Mapping[str, str]) -> Fact:
    value = env.get("LD_PRELOAD", "")
    other = next((name for name in _OTHER_MALLOCS if name in value), None)
    return Fact(
        section="settings",
        name="LD_PRELOAD",
        value=value or "not set",
        status="note" if other else "ok",
        advice=f"{other} replaces malloc: glibc's figures (mallinfo2) and MALLOC_ settings do not cover it."
        if other
        else None,
    )


def _flag(env: Mapping[str, str], name: str, advice: str) -> Fact:
    on = env.get(name, "0") not in ("", "0")
    return Fact(
        section="settings",
        name=name,
        value=env.get(name) or "not set",
        status="note" if on else "ok",
        advice=advice if on else None,
    )


def _shown(env: Mapping[str, str], name: str) -> Fact:
    return Fact(section="settings", name=name, value=env.get(name) or "not set")


def _thp() -> Iterator[Fact]:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        yield Fact(section="settings", name="transparent huge pages", value=UNKNOWN)
        return
    yield huge_pages(text)


def huge_pages(text: str) -> Fact:
    """Judge `/sys/kernel/mm/transparent_hugepage/enabled`, e.g. `always [madvise] never`."""
    chosen = re.search(r"\[(\w+)\]", text)
    value = UNKNOWN if chosen is None else chosen[1]
    return Fact(
        section="settings",
        name="transparent huge pages",
        value=value,
        status="note" if value == "always" else "ok",
        advice="Many small, sparse areas of memory then count whole 2 MiB pages as resident."
        if value == "always"
        else None,
    )


# Capabilities


@dataclass(frozen=True, slots=True)
class _Capability:
    """Something that newer releases of torch can tell, or a CUDA build only."""

    name: str
    path: str
    since: str
    parameter: str | None = None


_CAPABILITIES: Final = (
    _Capability("allocation history", "cuda.memory._record_memory_history", "2.8"),
    _Capability("history without some actions", "cuda.memory._record_memory_history", "2.11", "skip_actions"),
    _Capability(
        "history of pinned memory", "cuda.memory._record_memory_history", "2.14", "record_pinned_host_memory"
    ),
    _Capability("segments without traces", "cuda.memory.memory_snapshot", "2.11", "include_traces"),
    _Capability("stack of a live block", "cuda.memory._allocation_traceback", "2.12"),
    _Capability("labels on traces", "cuda.memory._set_memory_metadata", "2.10"),
    _Capability("labels on tensors", "cuda.memory._annotate_tensor", "2.14"),
    _Capability("pinned-memory statistics", "cuda.memory.host_memory_stats", "2.8"),
    _Capability("release of pinned memory", "accelerator.empty_host_cache", "2.12"),
    _Capability("hook on new graph nodes", "autograd.graph.node_creation_hook", "2.14"),
    _Capability("pools that never split", "cuda.MemPool", "2.10", "no_split"),
)
_OOM_OBSERVERS: Final = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")


def _capabilities(torch: ModuleType) -> Iterator[Fact]:
    for capability in _CAPABILITIES:
        there = _offers(torch, capability)
        yield Fact(
            section="capabilities",
            name=capability.name,
            value="yes" if there else "no",
            status="ok" if there else "note",
            advice=None if there else f"torch {capability.since} and newer.",
        )
    observes = any(hasattr(torch._C, name) for name in _OOM_OBSERVERS)
    yield Fact(
        section="capabilities",
        name="view into an out-of-memory",
        value="yes" if observes else "no",
        status="ok" if observes else "note",
        advice=None if observes else "CUDA builds of torch only.",
    )


def _offers(torch: ModuleType, capability: _Capability) -> bool:
    found: Any = torch
    for name in capability.path.split("."):
        found = getattr(found, name, None)
    if found is None or capability.parameter is None:
        return found is not None
    try:
        return capability.parameter in inspect.signature(found).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _release(text: str) -> tuple[int, int]:
    """Return major and minor of a version such as `2.9.1+cu130`."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))


# Printing


def _print(facts: list[Fact]) -> None:
    from memtriage.report.console import Page, console_for

    page = Page(console_for(sys.stdout))
    for number, (section, members) in enumerate(groupby(facts, key=lambda fact: fact.section)):
        if number:
            page.gap()
        page.line((section, "bold"))
        for fact in members:
            page.field(fact.name, fact.value, style=_STYLES[fact.status], labels=_NAMES)
            if fact.advice is not None:
                arrow = "!!" if fact.status == "bad" else "->"
                page.field("", f"{arrow} {fact.advice}", labels=_NAMES)
    bad = sum(fact.status == "bad" for fact in facts)
    page.gap()
    page.line((f"{bad} to change" if bad else "nothing to change", BAD if bad else GOOD))
