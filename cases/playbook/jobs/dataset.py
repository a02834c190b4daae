"""M3: a dataset is loaded whole, on the host or on the device, and does not fit; `--cured` maps its file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from limits import MIB, limit, parser, say

ITEM = 8 * MIB
ITEMS = 80
LIMIT = 400 * MIB
STEPS = 4


def resident() -> int:
    """Bytes of the process that are no pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def load_all(where: str) -> list[torch.Tensor]:
    """Every item in memory."""
    items = []
    for number in range(ITEMS):
        items.append(torch.full((ITEM // 4,), float(number), device=where))
    return items


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--keep-on", choices=["host", "device"], default="host")
    options = made.parse_args()
    before = resident()
    limit(
        options.device if options.keep_on == "device" else "cpu",
        LIMIT + (ITEM * ITEMS if options.cured else 0),
    )
    model = torch.nn.Linear(256, 256)
    if options.cured:  # the map takes addresses, but memory only for what is read
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.truncate(ITEM * ITEMS)
            items = torch.from_file(file.name, shared=False, size=ITEM * ITEMS // 4).view(ITEMS, -1)
    else:
        items = load_all(options.device if options.keep_on == "device" else "cpu")
    for step in range(STEPS):
        model(items[step % ITEMS][:256].cpu()).sum().backward()
    say(completed=True, resident=resident() - before)


if __name__ == "__main__":
    main()
