"""Trials made up for tests: trials files, and folders as finished trials leave them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark
from memtriage.prove.command import record_directory
from memtriage.prove.state import ComparisonState
from memtriage.prove.trial import LOG, TrialEnd, TrialOutcome, write_end
from memtriage.prove.trials import Trials, parse_trials
from memtriage.store.records import End, Start
from memtriage.store.writer import RankWriter

MIB = 1024**2
GIB = 1024**3

HEAD = """
[trials]
module = "job"
warmup = 1
repeats = 3
mark = "after refit"
"""
MORE = """
[values]
loss = 'loss ([0-9.]+)'
[[target]]
metric = "reserved"
variant = "fp8 + phase"
at_most = "1.1 x allocated + 100 MB"
[[target]]
metric = "time_per_step"
variant = "fp8 + phase"
at_most = "1.01 x fp8"
[[target]]
metric = "allocated"
variant = "fp8"
at_most = "bf16"
"""


def parsed(text: str, folder: Path) -> Trials:
    """The trials of a text, as if read from a file in this folder."""
    return parse_trials(tomllib.loads(text), folder / "trials.toml")


def trials_of(folder: Path, *names: str, more: str = "", head: str = HEAD) -> Trials:
    """Trials with variants of these names."""
    variants = "".join(f'[[variant]]\nname = "{name}"\n' for name in names)
    return parsed(head + variants + more, folder)


def write_rank(
    folder: Path,
    times: Sequence[float],
    memory: Sequence[tuple[int, int]],
    *,
    rank: int | None = None,
    world_size: int = 1,
    device: str = "cuda:0",
    peak: int | None = None,
    mark: str = "after refit",
    torch: str = "2.13.0",
    censuses: Sequence[int] = (),
) -> None:
    """Write a rank's record.

    Args:
        times: seconds of each step.
        memory: allocated and reserved bytes at the mark of each step.
        censuses: steps at whose end one was taken.
    """
    path = record_directory(folder) / "run" / "0" / f"rank-{rank or 0:05d}.jsonl"
    with RankWriter(path) as writer:
        writer.write("start", Start(run_id="run", rank=rank, world_size=world_size, torch=torch, time=1.0))
        now = 0.5
        for step, (seconds, (allocated, reserved)) in enumerate(zip(times, memory, strict=True), 1):
            for name, at in ((mark, now + 0.6 * seconds), ("step", now + seconds)):
                for where, sizes in (("cpu", (MIB, 2 * MIB)), (device, (allocated, reserved))):
                    writer.write(
                        "mark",
                        Mark(
                            name=name,
                            step=step if name == "step" else step - 1,
                            microbatch=1,
                            rank=rank,
                            time_s=at,
                            device=where,
                            allocated=sizes[0],
                            reserved=sizes[1],
                            host_rss=100 * MIB,
                        ),
                    )
            if step in censuses:
                writer.write("ledger", Ledger(device="cpu", step=step, total=MIB, source="", rows=[]))
            now += seconds
        highest = {} if peak is None else {device: peak}
        writer.write(
            "end",
            End(verdict="clean", steps=len(times), exit_code=0, peak_reserved=highest, peak_rss=150 * MIB),
        )


def write_trial(
    state: ComparisonState,
    name: str,
    number: int,
    times: Sequence[float] | None = None,
    memory: Sequence[tuple[int, int]] | None = None,
    *,
    log: str = "",
    ranks: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    outcome: TrialOutcome = "finished",
    **fields: Any,
) -> None:
    """Write the folder of a trial that ended."""
    folder = state.folder(name, number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).write_text(log)
    if times is not None:
        usual = memory if memory is not None else [(10 * MIB, 20 * MIB)] * len(times)
        for rank, sizes in (ranks or {0: usual}).items():
            write_rank(
                folder,
                times,
                sizes,
                rank=rank if ranks else None,
                world_size=len(ranks or [0]),
                device=f"cuda:{rank}",
            )
    known: dict[str, Any] = {
        "exit_code": 0 if outcome == "finished" else 1,
        "started": 1000.0 * number + len(name),
        "seconds": 10.0,
        "host": "node",
        "settings": state.settings(name),
    }
    write_end(TrialEnd(variant=name, round=number, outcome=outcome, **(known | fields)), folder)
