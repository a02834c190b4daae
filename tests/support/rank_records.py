"""Records of ranks, as the reader returns them."""

from pathlib import Path

from memtriage.model.marks import Mark
from memtriage.store.reader import RankRecord
from memtriage.store.records import End, Start

GIB = 1 << 30


def marks(rank, allocated, *, reserved=None, device="cuda:0", name="step"):
    """A mark per value, one at each step from 1 on."""
    return [
        Mark(
            name=name,
            step=step,
            microbatch=0,
            rank=rank,
            time_s=float(step),
            device=device,
            allocated=value,
            reserved=reserved,
            host_rss=GIB,
        )
        for step, value in enumerate(allocated, 1)
    ]


def rank_record(
    rank=None, *, world_size=1, allocated=(GIB,) * 12, end="clean", alive=None, findings=(), host=(), **start
):
    """A record of one rank that holds the same at every step and ended well, unless told otherwise."""
    record = RankRecord(Path(f"rank-{rank or 0:05d}.jsonl"))
    record.start = Start(run_id="r", rank=rank, world_size=world_size, time=0.0, **start)
    record.marks = marks(rank, allocated)
    record.final_findings = list(findings)
    record.interim_findings = list(findings)
    record.host = list(host)
    record.alive = alive
    if end is not None:
        record.end = End(verdict=end, steps=len(allocated), time_s=float(len(allocated)))
    return record
