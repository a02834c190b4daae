"""Settings of the CUDA caching allocator: what torch makes of `PYTORCH_CUDA_ALLOC_CONF`, version by version,
and the sizes that follow from it.

Sources: AllocatorConfig.h and .cpp in c10/core, CUDAAllocatorConfig.h and .cpp in c10/cuda. Sizes are bytes.
Known limitation: only the native allocator is described; `backend:cudaMallocAsync` is refused.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from typing import Final

import msgspec

from memtriage.model.units import MIB

MIN_BLOCK: Final = 512
"""Every block is a multiple of it (`kMinBlockSize`)."""
SMALL_LIMIT: Final = MIB
"""Largest rounded request that the small pool serves (`kSmallSize`)."""
SMALL_SEGMENT: Final = 2 * MIB
"""A segment of the small pool, and a page of an expandable one (`kSmallBuffer`)."""
LARGE_SEGMENT: Final = 20 * MIB
"""What requests between 1 and 10 MiB share: `kLargeBuffer`, since torch 2.11 the default of
`large_segment_size_mb`."""
OWN_SEGMENT: Final = 10 * MIB
"""From this rounded size on a request gets a segment of its own size (`kMinLargeAlloc`)."""
SEGMENT_STEP: Final = 2 * MIB
"""Such a segment is a multiple of it (`kRoundLarge`)."""

DIVISION_INTERVALS: Final = 16
"""`roundup_power2_divisions` has one value for each power of two from 1 MiB on; the last one, 32 GiB, also
serves everything above (`kRoundUpPowerOfTwoIntervals`)."""

Version = tuple[int, int]
"""Major and minor version of torch."""

OLDEST: Final[Version] = (2, 8)
NEWEST: Final[Version] = (2, 15)
"""The range of versions whose headers were compared. Newer ones are taken to behave like the newest."""

SPLIT_MINIMUM_INCLUSIVE: Final[Version] = (2, 9)
"""From here on `max_split_size_mb` may equal the size of a shared large segment; before it had to exceed
it."""
USER_POOLS_PROCESS_EVENTS: Final[Version] = (2, 12)
"""From here on only a graph capture, no longer every private pool, puts off stream events and flushes
(`is_capture_context`). Older and newer sources differ in this; that 2.12 is the first with it is inferred
from the settings that are next to it."""
ORDER_BY_CREATION: Final[Version] = (2, 13)
"""From here on free blocks of equal size are ordered by the age of their segment, before by address
(pytorch #183591, merged between the branch cuts of 2.12 and 2.13: inferred from the dates)."""

_SINCE: Final[dict[str, Version]] = {
    "backend": OLDEST,
    "max_split_size_mb": OLDEST,
    "max_non_split_rounding_mb": OLDEST,
    "garbage_collection_threshold": OLDEST,
    "roundup_power2_divisions": OLDEST,
    "expandable_segments": OLDEST,
    "release_lock_on_cudamalloc": OLDEST,
    "release_lock_on_hipmalloc": OLDEST,
    "pinned_use_cuda_host_register": OLDEST,
    "pinned_use_hip_host_register": OLDEST,
    "pinned_num_register_threads": OLDEST,
    "pinned_use_background_threads": OLDEST,
    "graph_capture_record_stream_reuse": (2, 9),
    "per_process_memory_fraction": (2, 10),
    "pinned_reserve_segment_size_mb": (2, 10),
    "large_segment_size_mb": (2, 11),
    "throw_on_cudamalloc_oom": (2, 12),
    "pinned_free_catch_all": (2, 12),
    "pinned_max_round_threshold_mb": (2, 13),
    "pinned_max_cached_size_mb": (2, 13),
    "expandable_segments_reserve": (2, 15),
    "expandable_segments_reserve_by_class": (2, 15),
}
"""Every key, and the first version that knows it. Those that `AllocatorSettings` has no field for change no
device memory: they concern host memory, locks, virtual address space or what a capture may reuse."""


class ConfError(ValueError):
    """An allocator configuration that torch would refuse, or that cannot be simulated."""


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how the allocator behaves. Sizes in bytes.

    Attributes:
        max_split_size: blocks of this size or more are never split; None for no limit.
        max_non_split_rounding: how much bigger than such a request a cached block may be.
        garbage_collection_threshold: share of the memory limit above which old cached blocks are freed before
            a new segment is asked for; 0 for never. It works only where a limit is set.
        roundup_power2_divisions: for each power of two from 1 MiB on, into how many steps it is divided when
            a request is rounded up; 0 or 1 for plain rounding to 512 bytes.
        expandable_segments: segments made of pages that are mapped and unmapped one by one.
        large_segment_size: what requests between 1 and 10 MiB share.
        memory_fraction: share of the device that the process may reserve; None for no limit.
        throw_on_cudamalloc_oom: refuse what goes beyond that limit without trying to free memory first.
        torch_version: whose behavior is meant.
    """

    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    memory_fraction: float | None = None
    throw_on_cudamalloc_oom: bool = False
    torch_version: Version = NEWEST

    def round_size(self, size: int) -> int:
        """The size of the block that serves a request, before any slack (`round_size`)."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        interval = min(max((size // MIB).bit_length() - 1, 0), DIVISION_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            # Up to the next of the equal steps between two powers of two (`roundup_power2_next_division`),
            # each at least half of `MIN_BLOCK`.
            floor = 1 << (size.bit_length() - 1)
            if size == floor:
                return size
            step = floor >> (divisions.bit_length() - 1)
            return -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_size(self, rounded: int) -> int:
        """The segment that is asked of the driver for a block of this size (`get_allocation_size`)."""
        if rounded <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if rounded < OWN_SEGMENT:
            return self.large_segment_size
        return -(-rounded // SEGMENT_STEP) * SEGMENT_STEP


def parse_conf(conf: str, torch_version: str | Version | None = None) -> AllocatorSettings:
    """Settings from the text of `PYTORCH_CUDA_ALLOC_CONF` (or `PYTORCH_ALLOC_CONF`).

    Args:
        conf: comma-separated `key:value` pairs; empty for the defaults.
        torch_version: whose keys and defaults are meant, e.g. `2.11.0+cu130`; of the installed one when None.

    Raises:
        ConfError: for what this version of torch would refuse, and for `backend:cudaMallocAsync`. Stricter
            than torch in one way: a number must be a number (torch reads `256MB` as 256 and drops the rest).
    """
    version = parse_version(torch_version)
    pairs = dict(_pairs(conf))
    for key in pairs:
        since = _SINCE.get(key)
        if since is None:
            known = ", ".join(sorted(one for one, first in _SINCE.items() if first <= version))
            raise ConfError(f"unknown allocator setting {key!r}; torch {_dotted(version)} knows: {known}")
        if since > version:
            raise ConfError(
                f"{key} needs torch {_dotted(since)} or newer, and torch {_dotted(version)} is meant"
            )
    backend = pairs.get("backend", "native")
    if backend != "native":
        raise ConfError(f"backend:{backend} cannot be simulated: only the native allocator can")
    large = _megabytes(pairs, "large_segment_size_mb", LARGE_SEGMENT, OWN_SEGMENT // MIB + 1)
    smallest = large // MIB
    strict = version < SPLIT_MINIMUM_INCLUSIVE
    return AllocatorSettings(
        max_split_size=_megabytes(pairs, "max_split_size_mb", 0, smallest + strict) or None,
        max_non_split_rounding=_megabytes(pairs, "max_non_split_rounding_mb", large, smallest + strict),
        garbage_collection_threshold=_threshold(pairs),
        roundup_power2_divisions=_parse_divisions(pairs.get("roundup_power2_divisions")),
        expandable_segments=_boolean(pairs, "expandable_segments"),
        large_segment_size=large,
        memory_fraction=_fraction(pairs),
        throw_on_cudamalloc_oom=_boolean(pairs, "throw_on_cudamalloc_oom"),
        torch_version=version,
    )


def join_conf(*parts: str) -> str:
    """The text of several settings; of one that is given twice the last counts."""
    return ",".join(filter(None, parts))


def parse_version(version: str | Version | None) -> Version:
    """Major and minor of a version of torch; of the installed one for None, the newest known without it."""
    if isinstance(version, tuple):
        return version
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return NEWEST
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ConfError(f"torch_version should look like 2.11.0, not {version!r}")
    return int(match[1]), int(match[2])


def _pairs(conf: str) -> Iterator[tuple[str, str]]:
    """Keys and values; commas inside brackets belong to the value. White space means nothing."""
    text = re.sub(r"\s+", "", conf)
    for part in re.findall(r"(?:\[[^\]]*\]|[^,])+", text):
        key, colon, value = part.partition(":")
        if not (key and colon and value):
            raise ConfError(f"expected key:value in the allocator settings, got {part!r}")
        if value.count("[") != value.count("]"):
            raise ConfError(f"{key}: a bracket is not closed in {value!r}")
        yield key, value


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _whole(key: str, value: str) -> int:
    if not re.fullmatch(r"\d+", value):
        raise ConfError(f"{key} should be a whole number, not {value!r}")
    return int(value)


def _megabytes(pairs: dict[str, str], key: str, default: int, least: int) -> int:
    if key not in pairs:
        return default
    value = _whole(key, pairs[key])
    if value < least:
        raise ConfError(f"{key} is {value}, but must be at least {least}")
    return value * MIB


def _boolean(pairs: dict[str, str], key: str) -> bool:
    value = pairs.get(key, "False")
    if value not in ("True", "False"):
        raise ConfError(f"{key} should be True or False (spelt like this), not {value!r}")
    return value == "True"


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfError(f"{key} should be a number, not {value!r}") from None


def _threshold(pairs: dict[str, str]) -> float:
    key = "garbage_collection_threshold"
    if key not in pairs:
        return 0.0
    value = _number(key, pairs[key])
    if not 0 < value < 1:
        raise ConfError(f"{key} is {pairs[key]}, but must lie between 0 and 1")
    return value


def _fraction(pairs: dict[str, str]) -> float | None:
    key = "per_process_memory_fraction"
    value = _number(key, pairs.get(key, "1"))
    if not 0 <= value <= 1:
        raise ConfError(f"{key} is {pairs[key]}, but must lie between 0 and 1")
    return value if value < 1 else None


def _parse_divisions(value: str | None) -> tuple[int, ...]:
    """One value for every interval, or a list `[boundary in MB:value, …, >:value]`.

    What stands for a boundary also serves everything below the first one; `>` serves all above the last.
    """
    if value is None:
        return (0,) * DIVISION_INTERVALS
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(key, value),) * DIVISION_INTERVALS
    divisions = [0] * DIVISION_INTERVALS
    last: int | None = None
    for entry in value[1:-1].split(","):
        boundary, colon, count_text = entry.partition(":")
        if not colon:
            raise ConfError(f"{key}: expected boundary:divisions, got {entry!r}")
        count = _power_of_two(key, count_text, zero_allowed=True)
        if boundary == ">":
            first = 1 if last is None else last + 1
            divisions[first:] = [count] * (DIVISION_INTERVALS - first)
            continue
        interval = min(_power_of_two(key, boundary).bit_length() - 1, DIVISION_INTERVALS - 1)
        if last is None:
            divisions[:interval] = [count] * interval
        divisions[interval] = count
        last = interval
    return tuple(divisions)


def _power_of_two(key: str, text: str, *, zero_allowed: bool = False) -> int:
    value = _whole(key, text)
    if value & (value - 1) or (value == 0 and not zero_allowed):
        raise ConfError(f"{key}: {text} should be a power of two" + (" or 0" if zero_allowed else ""))
    return value
