"""M20: what `empty_cache()` does: nothing for this process. Its largest possible tensor stays the same."""

from __future__ import annotations

import torch
from limits import GIB, MIB, limit, parser, say

import memtriage

CAP = 4 * GIB
LIVE = 2 * GIB


def largest() -> int:
    """The largest tensor that can be had now, in MiB steps; gives it back."""
    lowest, highest = 0, CAP // MIB
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        try:
            torch.empty(middle * MIB, dtype=torch.uint8, device="cuda")
            lowest = middle
        except torch.OutOfMemoryError:
            highest = middle
    return lowest * MIB


def main() -> None:
    parser(__doc__).parse_args()
    limit("cuda", CAP)
    live = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(LIVE // (64 * MIB))]
    freed = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del freed
    with_cache = largest()
    freed = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del freed
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    (ledger,) = memtriage.ledger("cuda:0")
    told = sum(row.bytes for row in ledger.rows if row.row == "releasable")
    torch.cuda.empty_cache()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    say(
        before=before, after=after, releasable=told, largest_with_cache=with_cache, largest_without=largest(),
        live=len(live),
    )  # fmt: skip


if __name__ == "__main__":
    main()
