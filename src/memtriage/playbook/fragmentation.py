"""What to say of fragmentation that grows while a program runs."""

from __future__ import annotations

from typing import Final

ENTRY: Final = "M8"
WHY: Final = "requests do not fit the free blocks between live ones, so new segments are reserved in addition"
EXPANDABLE_FIX: Final = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which releases by the page, unless memory is shared "
    "by CUDA IPC"
)
FIX: Final = (
    "call `memtriage.compact()` after a step now and then, or `memtriage.prime()` before the model is built; "
    "where lengths vary, pad them to a few sizes"
)
