"""Which owner holds how much after a refit, and whose blocks keep segments from going back.

    python who_holds.py PREFIX.fp8-clear.after-refit.0.json ...

prints what `loop.py --who PREFIX` wrote.
"""

from __future__ import annotations

import bisect
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import memtriage
from memtriage.account.gpu_ledger import DEFAULT_WORKSPACES, releasable_in
from memtriage.model.blocks import Block, Segment
from memtriage.model.census import StorageRecord
from memtriage.model.units import size
from memtriage.observe import cuda

_BY_PATH: Final = (
    ("fp8_workspaces", "FP8 weight workspaces"),
    ("cublas_workspace", "workspaces of cuBLAS"),
    ("master_param", "int16 parameter remainders"),
    ("exp_avg", "fp32 optimizer states"),
    ("scale", "FP8 scales and amax histories"),
    ("amax", "FP8 scales and amax histories"),
    ("fp8_meta", "FP8 scales and amax histories"),
    ("quantizer", "FP8 scales and amax histories"),
    ("gradients", "gradients"),
    ("decoupled_grad", "gradients"),
    ("otary", "rotary embeddings by length"),
)
"""What a holder path contains, and what the storage then is; the first that fits."""
_WORST: Final = 8


@dataclass(frozen=True, slots=True)
class Share:
    """What one owner keeps. Sizes in bytes.

    Attributes:
        owner: in words.
        blocks: how many.
        nbytes: of them.
        segments: segments in which it has blocks.
        strands_alone: free bytes that no other owner keeps from the driver.
        strands_with_others: free bytes that others keep too.
    """

    owner: str
    blocks: int
    nbytes: int
    segments: int
    strands_alone: int
    strands_with_others: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """A segment that cannot go back.

    Attributes:
        size: of the segment.
        free: bytes of it that are not in use.
        owners: bytes in use, by owner.
    """

    size: int
    free: int
    owners: dict[str, int]


@dataclass(frozen=True, slots=True)
class Table:
    """All of a device at one instant. Sizes in bytes.

    Attributes:
        instant: which, in words.
        allocated, reserved: of the caching allocator.
        shares: by owner, the largest first.
        worst: the segments with most free bytes.
    """

    instant: str
    allocated: int
    reserved: int
    shares: list[Share]
    worst: list[Pinned]


def owner_of(record: StorageRecord) -> str:
    """Name what a storage is, as the question asks."""
    if record.owner == "parameter":  # the model is not the only one to hold it
        return "weights"
    path = record.holder or ""
    for part, name in _BY_PATH:
        if part in path:
            return name
    return "gradients" if record.owner == "gradient" else record.owner


def table(instant: str, segments: Sequence[Segment], records: Iterable[StorageRecord]) -> Table:
    """Join segments with the storages in them. Pure."""
    named = sorted((record.address, owner_of(record)) for record in records if record.address)
    addresses = [address for address, _ in named]

    def name(block: Block) -> str:
        at = bisect.bisect_left(addresses, block.address)
        if at < len(named) and addresses[at] < block.address + block.size:
            return named[at][1]
        if block.requested in DEFAULT_WORKSPACES.cublas | DEFAULT_WORKSPACES.cublaslt:
            return "workspaces of cuBLAS"
        return "c++ only"

    blocks: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    pinned = []
    for segment in segments:
        owners: defaultdict[str, int] = defaultdict(int)
        for block in segment.blocks:
            if block.state != "free":
                owners[name(block)] += block.size
                blocks[name(block)] += 1
        stranded = segment.size - sum(owners.values()) - releasable_in(segment)
        nbytes.update(owners)
        inside.update(owners.keys())
        (alone if len(owners) == 1 else shared).update(dict.fromkeys(owners, stranded))
        if stranded:
            pinned.append(Pinned(segment.size, stranded, dict(owners)))
    shares = [
        Share(one, blocks[one], total, inside[one], alone[one], shared[one])
        for one, total in nbytes.most_common()
    ]
    return Table(
        instant=instant,
        allocated=sum(nbytes.values()),
        reserved=sum(segment.size for segment in segments),
        shares=shares,
        worst=sorted(pinned, key=lambda one: -one.free)[:_WORST],
    )


def lines(one: Table | dict[str, Any]) -> list[str]:
    """The table as text."""
    made = one if isinstance(one, dict) else asdict(one)
    told = [
        f"{made['instant']}: {size(made['allocated'])} allocated, {size(made['reserved'])} reserved",
        f"{'owner':32} {'blocks':>7} {'bytes':>10} {'segments':>9} {'strands alone':>14} {'with others':>12}",
    ]
    for share in made["shares"]:
        told.append(
            f"{share['owner']:32} {share['blocks']:7} {size(share['nbytes']):>10} {share['segments']:9} "
            f"{size(share['strands_alone']):>14} {size(share['strands_with_others']):>12}"
        )
    for each in made["worst"]:
        pins = ", ".join(f"{name} {size(count)}" for name, count in each["owners"].items())
        told.append(f"  segment of {size(each['size'])}, {size(each['free'])} free, kept by {pins}")
    return told


def write_tables(path: str, instant: str) -> None:
    """Look at this process's current device, print the table and write it to `path`."""
    import torch

    device = torch.cuda.current_device()
    torch.cuda.synchronize(device)
    segments = cuda.segments(device) or []
    records = [storage for storage in memtriage.census().storages if storage.device == f"cuda:{device}"]
    made = table(instant, segments, records)
    print("\n".join(lines(made)), flush=True)
    Path(path).write_text(json.dumps(asdict(made), indent=1), encoding="utf-8")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print("\n".join(lines(json.loads(Path(given).read_text(encoding="utf-8")))))
