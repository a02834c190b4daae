"""Run directories of jobs in progress, written by the store's own writer, rank by rank and mark by mark."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import End, RecordedFinding, Start
from memtriage.store.writer import RankWriter

MIB = 1024**2
NOW = 10_000.0


class LiveRank:
    """A rank that writes its record; `allocated` grows by `growth` a step."""

    def __init__(
        self,
        directory: Path,
        rank: int | None = None,
        *,
        world_size: int = 1,
        growth: int = 0,
        base: int = 1000 * MIB,
        run: str = "run",
        restart: int = 0,
        device: str | None = None,
        **start: Any,
    ) -> None:
        self.rank, self.growth, self.base = rank, growth, base
        self.device = device or f"cuda:{rank or 0}"
        self.path = record_path(directory, RankIdentity(run, restart, rank, world_size, rank))
        self.writer = RankWriter(self.path)
        self.done = 0
        about: dict[str, Any] = {
            "run_id": run,
            "restart": restart,
            "rank": rank,
            "world_size": world_size,
            "time": NOW,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "argv": ["train.py", "--lr", "3e-4"],
        }
        self.writer.write("start", Start(**(about | start)))

    def steps(self, count: int) -> LiveRank:
        for _ in range(count):
            self.done += 1
            self.mark("step", self.base + self.done * self.growth)
        return self

    def mark(self, name: str, allocated: int | None, device: str | None = None) -> LiveRank:
        self.writer.write(
            "mark",
            Mark(
                name=name,
                step=self.done,
                microbatch=0,
                rank=self.rank,
                time_s=float(self.done),
                device=device or self.device,
                allocated=allocated,
                reserved=None if allocated is None else allocated + 200 * MIB,
                host_rss=3000 * MIB,
            ),
        )
        return self

    def ledger(self, stranded: int) -> LiveRank:
        rows = [
            LedgerRow(row="requested", bytes=600 * MIB, owner="parameter", detail="model.layers[*]"),
            LedgerRow(row="stranded", bytes=stranded),
        ]
        total = sum(row.bytes for row in rows)
        self.writer.write("ledger", Ledger(device=self.device, total=total, source="test", rows=rows))
        return self

    def leak(self, per_step: int = 32 * MIB) -> LiveRank:
        self.writer.write(
            "finding",
            RecordedFinding(
                kind="leak",
                device=self.device,
                rank=self.rank,
                bytes=10 * per_step,
                bytes_per_step=per_step,
                holder="train.losses[*] -> grad_fn MulBackward0",
                allocated_at="train.py:7 in train",
                fix="detach",
                playbook="M21",
            ),
        )
        return self

    def end(self, verdict: Any = "clean", **fields: Any) -> LiveRank:
        self.writer.write("end", End(verdict=verdict, steps=self.done, time_s=float(self.done), **fields))
        self.writer.close()
        return self
