"""Settings: environment variables that change allocators, the garbage collector, huge pages."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from typing import Final

from memtriage.model.machine import Fact
from memtriage.model.units import UNKNOWN

_OTHER_MALLOCS: Final = ("jemalloc", "tcmalloc", "mimalloc", "tbbmalloc")


def settings(env: Mapping[str, str], torch: tuple[int, ...] | None) -> Iterator[Fact]:
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


def _allocator_settings(env: Mapping[str, str], torch: tuple[int, ...] | None) -> Iterator[Fact]:
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


def huge_pages(text: str | None) -> Fact:
    """Judge `/sys/kernel/mm/transparent_hugepage/enabled`, e.g. `always [madvise] never`; None if absent."""
    chosen = re.search(r"\[(\w+)\]", text or "")
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
