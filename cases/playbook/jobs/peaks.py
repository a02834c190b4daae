"""M18: the peak of each step, which one figure at the end of the first step does not show."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from limits import parser, say

import memtriage

sys.path.insert(0, str(Path(__file__).parent.parent))
from programs import Size, program

SIZE = Size(hidden=1024, head=64, layers=12, vocabulary=8192, batch=4, length=512, dtype=torch.float32)
STEPS = 3


def main() -> None:
    options = parser(__doc__).parse_args()
    prediction = memtriage.predict(program(SIZE), steps=STEPS)
    predicted = [step.peak_allocated for step in prediction.steps]
    if options.device != "cuda":
        say(predicted=predicted, phase=prediction.peak_phase)
        return
    _, _, step = program(SIZE)("cuda")
    peaks, reserved = [], []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
    say(predicted=predicted, phase=prediction.peak_phase, peaks=peaks, reserved=reserved,
        allocated=torch.cuda.memory_allocated())  # fmt: skip


if __name__ == "__main__":
    main()
