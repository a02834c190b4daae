"""Recorded runs made up for tests of reports: what their ranks would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.store.reader import RankRecord, RunRecord
from memtriage.store.records import End, Start

MIB = 1024**2
GIB = 1024**3

WEIGHTS = 6 * GIB
ACTIVATIONS = 9 * GIB


def step_mark(step: int, allocated: int, rank: int | None = None) -> Mark:
    """The mark of a step on the first GPU, one second after the step before."""
    return Mark(
        name="step", step=step, microbatch=0, rank=rank, time_s=float(step), device="cuda:0",
        allocated=allocated,
    )  # fmt: skip


def leak(rank: int | None = None, **fields: Any) -> Finding:
    """A finding with every field filled in."""
    known: dict[str, Any] = {
        "kind": "leak",
        "device": "cuda:0",
        "rank": rank,
        "bytes": 6724 * MIB,
        "bytes_per_step": 164 * MIB,
        "bytes_per_microbatch": 82 * MIB,
        "holder": "train.losses['lm'][*] -> grad_fn WrapBackward -> ctx.context[1] -> saved tensor of "
        "LinearBackward in model.transformer.h.11.mlp.c_proj",
        "also_held_by": ["frame evaluate(): acts", "closure of hook grab: captured['n1'][*]"],
        "stored_at": "/home/user/projects/fast-llm/train.py:150 in train",
        "allocated_at": "/home/user/projects/fast-llm/train.py:142 in loss_func",
        "mechanism": "Each step's loss still carries its graph.",
        "fix": "Store `loss.detach()` or `loss.item()` instead of the loss.",
        "playbook": "M21",
        "phase": "forward",
        "step": 41,
        "evidence": ["allocated rose at each of 38 steps", "2,132 storages are reachable only from there"],
    }
    return Finding(**(known | fields))


def gpu_rank(
    rank: int | None = None,
    world_size: int = 1,
    *,
    steps: int = 41,
    growth: int = 0,
    findings: tuple[Finding, ...] = (),
    end: End | None = None,
    own_mark: str | None = None,
    **start: Any,
) -> RankRecord:
    """A rank that trained two micro-batches a step on one GPU, `growth` bytes more at each step."""
    device = f"cuda:{rank or 0}"
    end = end or End(verdict="leak" if growth else "clean", steps=steps, exit_code=0, time_s=4.0 * steps)
    end.device_limits.setdefault(device, 79 * GIB)
    record = RankRecord(
        Path(f"rank-{rank or 0:05d}.jsonl"),
        start=Start(
            **{
                "run_id": "job",
                "rank": rank,
                "world_size": world_size,
                "host": f"node{(rank or 0) // 8}",
                "argv": ["/home/user/train.py", "--lr", "3e-4"],
                "python": "3.12.3",
                "torch": "2.9.1+cu128",
                "time": 1_700_000_000.0,
                "host_limit": 512 * GIB,
                **start,
            }
        ),
        final_findings=list(findings),
        end=end,
    )
    record.marks = list(_marks(rank, device, steps, growth, own_mark))
    ledgers = (_gpu_ledger(device, steps * growth), _host_ledger())
    record.ledgers = {ledger.device: ledger for ledger in ledgers}
    return record


def _marks(rank: int | None, device: str, steps: int, growth: int, own_mark: str | None) -> Any:
    def both(name: str, step: int, microbatch: int, time_s: float, allocated: int, reserved: int) -> Any:
        place = {"name": name, "step": step, "microbatch": microbatch, "rank": rank, "time_s": time_s}
        held = (2 * GIB + step * MIB, 2 * GIB + 300 * MIB)
        host = {"host_rss": 5 * GIB + step * MIB, "host_pinned": 512 * MIB}
        yield Mark(**place, device="cpu", allocated=held[0], reserved=held[1], **host)
        if name != "start":
            counters = {"allocated": allocated, "reserved": reserved, "requested": allocated}
            yield Mark(**place, device=device, **counters, **host)

    yield from both("start", 0, 0, 0.0, 0, 0)
    top = 0
    for step in range(steps):
        stays = WEIGHTS + (2 * WEIGHTS if step else 0) + step * growth
        top = max(top, stays + ACTIVATIONS)
        for microbatch in (1, 2):
            at = 4.0 * step + microbatch
            yield from both("backward", step, microbatch, at, stays + ACTIVATIONS - microbatch * GIB, top)
        yield from both("step", step + 1, 2, 4.0 * step + 3, stays + 2 * WEIGHTS * (step == 0) + growth, top)
        if own_mark is not None and step % 10 == 9:
            yield from both(own_mark, step + 1, 0, 4.0 * step + 3.5, stays + GIB, top)


def _gpu_ledger(device: str, leaked: int) -> Ledger:
    rows = [
        LedgerRow(
            row="requested", bytes=2 * WEIGHTS, owner="optimizer state", detail="2 storages a parameter"
        ),
        LedgerRow(row="requested", bytes=WEIGHTS, owner="parameter", detail="model.transformer.h[*]"),
        LedgerRow(row="requested", bytes=leaked, owner="saved for backward", detail="train.losses['lm'][*]"),
        LedgerRow(row="requested", bytes=96 * MIB, owner="c++ only"),
        LedgerRow(row="rounding", bytes=31 * MIB, detail="block sizes above what was asked for"),
        LedgerRow(row="awaiting stream events", bytes=0),
        LedgerRow(row="releasable", bytes=6 * GIB, detail="empty_cache() returns it"),
        LedgerRow(row="stranded", bytes=2 * GIB + 100 * MIB, detail="pinned by 14 blocks of train.py:142"),
        LedgerRow(row="context", bytes=624 * MIB, detail="CUDA context, kernels and libraries"),
        LedgerRow(row="outside the allocator", bytes=1200 * MIB, detail="NCCL and the like"),
        LedgerRow(row="unexplained", bytes=-3 * MIB, detail="not all figures are read at the same instant"),
    ]
    rows = [row for row in rows if row.bytes]
    return Ledger(device=device, total=sum(row.bytes for row in rows), source="cudaMemGetInfo", rows=rows)


def _host_ledger() -> Ledger:
    rows = [
        LedgerRow(row="pinned tensors", bytes=512 * MIB, owner="variable", detail="frame main(): staging"),
        LedgerRow(row="malloc in use", bytes=2 * GIB),
        LedgerRow(row="malloc retained", bytes=300 * MIB, detail="malloc_trim(0) returns most of it"),
        LedgerRow(row="libraries", bytes=3 * GIB, detail="code and data of shared objects"),
    ]
    return Ledger(device="host", total=sum(row.bytes for row in rows), source="/proc/self/smaps", rows=rows)


def run(*ranks: RankRecord, notes: tuple[str, ...] = ()) -> RunRecord:
    """A run of these ranks."""
    return RunRecord(ranks=list(ranks), notes=list(notes))
