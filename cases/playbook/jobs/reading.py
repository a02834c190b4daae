"""M2, M18: one large request: refused by a cap, or (`--bare`) without a caching allocator to say why."""

from __future__ import annotations

import torch
from limits import GIB, MIB, limit, parser, say

CAP = 4 * GIB
LIVE = 3 * GIB
REQUEST = 2 * GIB + 100 * MIB


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--bare", action="store_true", help="ask for more than the device has")
    options = made.parse_args()
    if options.bare:
        torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
        return
    if not options.cured:
        limit("cuda", CAP)
    kept = [torch.empty(256 * MIB, dtype=torch.uint8, device="cuda") for _ in range(LIVE // (256 * MIB))]
    try:
        logits = torch.empty(REQUEST, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        say(
            text=f"torch.OutOfMemoryError: {error}", requested=REQUEST, cap=CAP,
            allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved(),
            total=torch.cuda.mem_get_info()[1],
        )  # fmt: skip
    else:
        say(completed=True, allocated=torch.cuda.memory_allocated(), kept=len(kept), got=logits.numel())


if __name__ == "__main__":
    main()
