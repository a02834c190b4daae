"""Four ways to die of memory, each at its own step: `dies.py M14|M15|M16|M17` [--cured] [--predict].

M14 in the first backward (logits of a large vocabulary), M15 in evaluation (gradients on, logits kept),
M16 on the one long batch, M17 in the first optimizer step (AdamW's state). The limit of each lies between
what the steps before need and what that step needs. `--predict` prints what memtriage says beforehand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from limits import GIB, MIB, limit, parser, say
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent))
from programs import Size, program

STEPS = 10
LONG_AT = 7
"""The step that gets the long batch, counted from 1."""
EVALUATED = 24
TRAINED_BEFORE = 2
CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A job: its model and batch, its limit in bytes, its cure, and the length of its longest batch."""

    size: Size
    limit: int
    cure: Literal["chunked loss", "no_grad", "cap", "bf16"]
    longest: int | None = None


_FULL = Size(hidden=1024, head=64, layers=4, vocabulary=2048, batch=16, length=512, dtype=torch.float32)
_TINY = Size(hidden=256, head=64, layers=4, vocabulary=2048, batch=4, length=256, dtype=torch.float32)
CASES = {
    "cuda": {
        "M14": Case(replace(_FULL, layers=2, vocabulary=32000), 4500 * MIB, "chunked loss"),
        "M15": Case(replace(_FULL, vocabulary=8192), 12 * GIB, "no_grad"),
        "M16": Case(replace(_FULL, batch=4), 4 * GIB, "cap", longest=4096),
        "M17": Case(replace(_FULL, layers=16, batch=1, length=128), 2700 * MIB, "bf16"),
    },
    "cpu": {
        "M14": Case(replace(_TINY, hidden=128, layers=2, vocabulary=32000), 400 * MIB, "chunked loss"),
        "M15": Case(replace(_TINY, vocabulary=8192), 700 * MIB, "no_grad"),
        "M16": Case(replace(_TINY, batch=2), 500 * MIB, "cap", longest=2048),
        "M17": Case(replace(_TINY, hidden=512, layers=12, batch=1, length=64), 560 * MIB, "bf16"),
    },
}


def build(case: Case, device: Any, *, cured: bool, length: int | None = None) -> Any:
    """Model, optimizer and step of a job, for batches of one length."""
    size = case.size
    size = replace(size, length=length or size.length)
    if cured and case.cure == "bf16":
        size = replace(size, dtype=torch.bfloat16)  # and so gradients and AdamW's state
    if not (cured and case.cure == "chunked loss"):
        return program(size)(device)
    model, optimizer, _ = program(size)(device)

    def step() -> None:
        ids = torch.randint(0, size.vocabulary, (size.batch, size.length), device=device)
        _chunked_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _chunked_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss by some rows at a time, whose logits are computed again in backward."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()

    def part(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model.lm_head(rows).float(), of, reduction="sum")

    parts = zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
    return sum(checkpoint(part, rows, of, use_reentrant=False) for rows, of in parts) / len(labels)


def evaluate(model: Any, size: Size, device: str, batches: int, *, cured: bool) -> Iterator[int]:
    """Evaluates batch after batch and keeps what the metric wants; yields how many it has done."""
    kept = []
    for number in range(batches):
        ids = torch.randint(0, size.vocabulary, (size.batch, size.length), device=device)
        with torch.set_grad_enabled(not cured):
            logits = model(input_ids=ids, use_cache=False).logits
        kept.append(logits.argmax(-1) if cured else logits)
        yield number + 1


def lengths(case: Case, *, cured: bool) -> list[int]:
    """Of the batches, in the order in which they come."""
    found = [case.size.length] * STEPS
    if case.longest is not None:
        found[LONG_AT - 1] = 2 * case.size.length if cured else case.longest  # cured: capped
    return found


def run(case: Case, device: str, *, cured: bool) -> None:
    """Trains, and evaluates where that is the case, under the limit."""
    limit(device, case.limit)
    steps: dict[int, Callable[[], None]] = {}
    model, optimizer, steps[case.size.length] = build(case, device, cured=cured)
    took = []
    for number, length in enumerate(lengths(case, cured=cured)):
        if case.cure == "no_grad" and number == TRAINED_BEFORE:
            break
        if length not in steps:
            steps[length] = _other_length(case, model, optimizer, device, length)
        began = time.perf_counter()
        steps[length]()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        print(f"step {number + 1}", file=sys.stderr, flush=True)
    if case.cure == "no_grad":
        for done in evaluate(model, case.size, device, EVALUATED, cured=cured):
            print(f"evaluated {done}", file=sys.stderr, flush=True)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    say(completed=True, peak=peak, step_s=min(took))


def _other_length(case: Case, model: Any, optimizer: Any, device: str, length: int) -> Callable[[], None]:
    size = case.size

    def step() -> None:
        ids = torch.randint(0, size.vocabulary, (size.batch, length), device=device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def predict(case: Case, *, cured: bool) -> None:
    """Says at which step it dies by memtriage's prediction, and what peaks it needs. Needs no GPU."""
    import memtriage

    def predicted(made: Callable[[Any], Any], steps: int = 2) -> Any:
        return memtriage.predict(made, steps=steps)

    if case.cure == "no_grad":

        def evaluating(batches: int) -> Callable[[Any], Any]:
            def made(device: Any) -> Any:
                model, optimizer, train = build(case, device, cured=cured)

                def step() -> None:
                    train()
                    for _ in evaluate(model, case.size, device, batches, cured=cured):
                        pass

                return model, optimizer, step

            return made

        one, more = (predicted(evaluating(count)).peak_allocated for count in (4, 8))
        each = (more - one) / 4
        dies = next((n for n in range(1, EVALUATED + 1) if one + (n - 4) * each > case.limit), None)
        say(peaks=[one, more], each=round(each), dies_at=dies, limit=case.limit)
        return
    by_length: dict[int, Any] = {}
    dies = None
    for number, length in enumerate(lengths(case, cured=cured)):
        if length not in by_length:
            by_length[length] = predicted(
                lambda device, length=length: build(case, device, cured=cured, length=length)
            )
        found = by_length[length].steps
        needed = found[min(number, len(found) - 1)].peak_allocated
        if dies is None and needed > case.limit:
            dies = number + 1
    say(
        peaks={length: [step.peak_allocated for step in found.steps] for length, found in by_length.items()},
        phase=by_length[max(by_length)].peak_phase, dies_at=dies, limit=case.limit,
    )  # fmt: skip


def main() -> None:
    made = parser(__doc__)
    made.add_argument("entry", choices=list(CASES["cpu"]))
    made.add_argument("--predict", action="store_true", help="say what memtriage predicts, and end")
    options = made.parse_args()
    torch.manual_seed(0)
    case = CASES[options.device][options.entry]
    if options.predict:
        predict(case, cured=options.cured)
    else:
        run(case, options.device, cured=options.cured)


if __name__ == "__main__":
    main()
