"""Live storages as ranges of addresses, and how many of their bytes are in each block."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.census import StorageRecord


class Claim(msgspec.Struct, frozen=True):
    """Bytes [start, end) that are counted for one storage only."""

    start: int
    end: int
    storage: StorageRecord


class OwnedPart(msgspec.Struct, frozen=True):
    """Bytes of one pool that have one owner, with the words that name them."""

    pool: tuple[int, int]
    owner: str | None
    label: str
    size: int


def disjoint_claims(storages: Iterable[StorageRecord]) -> list[Claim]:
    """Return storages as ranges that do not overlap, in order of address."""
    alive = [storage for storage in storages if storage.nbytes > 0 and storage.address > 0]
    claims: list[Claim] = []
    taken = 0
    for storage in sorted(alive, key=lambda storage: (storage.address, -storage.nbytes)):
        start, end = max(storage.address, taken), storage.address + storage.nbytes
        if start < end:
            claims.append(Claim(start, end, storage))
            taken = end
    return claims


def overlaps(claims: Sequence[Claim], start: int, end: int) -> Iterator[tuple[Claim, int]]:
    """Yield the claims that reach into [start, end), each with its bytes there."""
    position = max(0, bisect_right(claims, start, key=lambda claim: claim.start) - 1)
    while position < len(claims) and claims[position].start < end:
        claim = claims[position]
        shared = min(end, claim.end) - max(start, claim.start)
        if shared > 0:
            yield claim, shared
        position += 1


def outside_segments(claims: Sequence[Claim], segments: Sequence[Segment]) -> list[OwnedPart]:
    """Return the parts of storages outside every segment."""
    inside: Counter[int] = Counter()
    for segment in segments:
        for claim, shared in overlaps(claims, segment.address, segment.end):
            inside[claim.start] += shared
    unclaimed = ((claim, claim.end - claim.start - inside[claim.start]) for claim in claims)
    return [
        OwnedPart(DEFAULT_POOL, claim.storage.owner, holder_of(claim.storage), size)
        for claim, size in unclaimed
        if size > 0
    ]


def holder_of(storage: StorageRecord) -> str:
    """Say in words what keeps a storage alive."""
    return storage.named or "holder unknown"
