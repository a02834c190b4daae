"""What `memtriage report` costs for a job of many ranks: 1,024 ranks x 1,000 marks, made up, then reported.

    python benchmarks/many_ranks.py [--ranks N] [--marks N] [--repeats N] [--keep DIR] [--json FILE]

The records are written with the store's own writer, so they are what such a job leaves behind. The job is a
pipeline of four stages of equal size, on nodes of eight GPUs; the last stage has the head and takes more. All
ranks carry noise. Some stand out:

leaking           keeps `LEAK` more at each step, and says so in a finding
more reserved     its allocator took `PEAK` more from the driver, for the same tensors
killed            ends after a third of the steps, in the middle of a line
fewer marks       its steps are longer: it recorded every second mark only
restarts          two earlier attempts of the same run lie beside, which a report must leave alone

Each way to report runs in fresh processes: wall seconds from start to exit, imports included, seconds of all
cores, and the highest resident set (`ru_maxrss`, of the whole process). Warm: the files were just read. Cold:
the kernel was asked to drop them from its page cache first. On a busy machine the fastest tells most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import End, HostSampleLine, RecordedFinding, Start
from memtriage.store.writer import RankWriter

MIB: Final = 1024**2
GIB: Final = 1024**3

STAGES: Final = 4
GPUS_A_NODE: Final = 8
MARKS_A_STEP: Final = 4
"""Backward and step, each of the GPU and of the host."""
STEP_S: Final = 1.7

WEIGHTS: Final = 18 * GIB
HEAD: Final = 3 * GIB
ACTIVATIONS: Final = 40 * GIB
LEAK: Final = 24 * MIB
PEAK: Final = 6 * GIB
DEVICE_LIMIT: Final = 139 * GIB
HOST_LIMIT: Final = 1800 * GIB
NOISE: Final = 0.002
"""Of what a rank has: other batches, other pieces."""

RUN: Final = "job-4711"
RESTARTS: Final = 2
MARKS_OF_RESTART: Final = 20


@dataclass(frozen=True, slots=True)
class Job:
    """A job, and which of its ranks stand out.

    Attributes:
        ranks, marks: how many, and how many lines of marks each writes.
        leaking, reserving, killed, sparse: the ranks that stand out.
    """

    ranks: int
    marks: int

    @property
    def leaking(self) -> int:
        return self.ranks // 60

    @property
    def reserving(self) -> int:
        return self.ranks * 3 // 10

    @property
    def killed(self) -> int:
        return self.ranks * 11 // 16

    @property
    def sparse(self) -> int:
        return self.ranks * 7 // 8

    @property
    def steps(self) -> int:
        return self.marks // MARKS_A_STEP


def make(job: Job, directory: Path, *, restarts: int = RESTARTS) -> Path:
    """Write the records of a job below `directory` and return the folder of its run."""
    for restart in range(restarts):
        early = Job(job.ranks, min(job.marks, MARKS_OF_RESTART))
        for rank in range(job.ranks):
            _write(directory, early, rank, restart, began=1_764_000_000.0 + 900 * restart, stands_out=False)
    for rank in range(job.ranks):
        _write(directory, job, rank, restarts, began=1_764_000_000.0 + 900 * restarts, stands_out=True)
    return directory / RUN


def _write(directory: Path, job: Job, rank: int, restart: int, *, began: float, stands_out: bool) -> None:
    noise = random.Random(f"{restart}/{rank}")
    identity = RankIdentity(RUN, restart, rank, job.ranks, rank % GPUS_A_NODE)
    device = f"cuda:{rank % GPUS_A_NODE}"
    killed = stands_out and rank == job.killed
    leaking = stands_out and rank == job.leaking
    steps = job.steps // 3 if killed else job.steps
    with RankWriter(record_path(directory, identity)) as writer:
        writer.write("start", _start(job, rank, restart, began + noise.uniform(0, 20)))
        top = 0
        for mark in _marks(job, rank, device, steps, noise, stands_out):
            writer.write("mark", mark)
            top = max(top, mark.reserved or 0)
            if mark.name == "step" and mark.device == device and mark.step % 20 == 3:
                writer.write("host", _host(mark, noise))
            if mark.name == "step" and mark.device == device and mark.step == 3:
                for ledger in _ledgers(job, rank, device):
                    writer.write("ledger", ledger)
        if leaking:
            writer.write("finding", _leak(rank, device, job.steps))
        path = writer.path
        if not killed:
            writer.write(
                "end",
                End(
                    verdict="leak" if leaking else "clean",
                    steps=steps,
                    exit_code=0,
                    time_s=STEP_S * steps,
                    device_limits={device: DEVICE_LIMIT},
                    peak_allocated={device: top - GIB},
                    peak_reserved={device: top},
                    peak_rss=12 * GIB,
                ),
            )
    if killed:
        os.truncate(path, path.stat().st_size - 40)


def _start(job: Job, rank: int, restart: int, time_s: float) -> Start:
    return Start(
        run_id=RUN,
        restart=restart,
        rank=rank,
        world_size=job.ranks,
        local_rank=rank % GPUS_A_NODE,
        pid=4000 + rank % GPUS_A_NODE,
        pid_start=123456,
        host=f"node{rank // GPUS_A_NODE:04d}",
        argv=["train.py", "--config", "70b.toml"],
        python="3.12.3",
        torch="2.11.0",
        time=round(time_s, 3),
        host_limit=HOST_LIMIT,
    )


def _marks(
    job: Job, rank: int, device: str, steps: int, noise: random.Random, stands_out: bool
) -> Iterator[Mark]:
    last_stage = rank * STAGES // job.ranks == STAGES - 1
    own = round(noise.gauss(0, NOISE) * WEIGHTS) + (HEAD if last_stage else 0)
    growth = LEAK if stands_out and rank == job.leaking else 0
    more = PEAK if stands_out and rank == job.reserving else 0
    every = 2 if stands_out and rank == job.sparse else 1
    rss = 9 * GIB + round(noise.gauss(0, NOISE) * 9 * GIB)
    top = 0
    for step in range(steps):
        stays = WEIGHTS + own + (2 * WEIGHTS if step else 0) + step * growth
        held = stays + ACTIVATIONS // 8 + round(noise.gauss(0, NOISE) * ACTIVATIONS)
        top = max(top, stays + ACTIVATIONS + round(noise.gauss(0, NOISE) * ACTIVATIONS) + more)
        began = STEP_S * step
        if step % every:
            continue
        for name, number, at, allocated in (
            ("backward", step, began + 1.2 + noise.uniform(0, 0.05), held),
            (
                "step",
                step + 1,
                began + 1.6 + noise.uniform(0, 0.05),
                stays + 2 * WEIGHTS * (step == 0) + growth,
            ),
        ):
            place = {"name": name, "step": number, "microbatch": 1, "rank": rank, "time_s": round(at, 6)}
            host = {"host_rss": rss + noise.randrange(8 * MIB), "host_pinned": 512 * MIB}
            malloc = 3 * GIB + noise.randrange(2 * MIB)
            yield Mark(**place, device="cpu", allocated=malloc, reserved=malloc + 200 * MIB, **host)
            yield Mark(
                **place,
                device=device,
                allocated=allocated // 512 * 512,
                reserved=top // (2 * MIB) * 2 * MIB,
                requested=allocated // 512 * 512 - 77 * 512,
                outside=620 * MIB if name == "step" else None,
                **host,
            )


def _host(mark: Mark, noise: random.Random) -> HostSampleLine:
    rss = mark.host_rss or 0
    return HostSampleLine(
        time_s=mark.time_s,
        step=mark.step,
        rss=rss,
        pss=rss - 300 * MIB,
        children_pss=2 * GIB,
        available=1500 * GIB + noise.randrange(GIB),
    )


def _ledgers(job: Job, rank: int, device: str) -> Iterator[Ledger]:
    head = HEAD if rank * STAGES // job.ranks == STAGES - 1 else 0
    rows = [
        LedgerRow(
            row="requested", bytes=2 * WEIGHTS, owner="optimizer state", detail="2 storages a parameter"
        ),
        LedgerRow(row="requested", bytes=WEIGHTS + head, owner="parameter", detail="model.layers[*]"),
        LedgerRow(row="rounding", bytes=31 * MIB, detail="block sizes above what was asked for"),
        LedgerRow(row="releasable", bytes=40 * GIB, detail="empty_cache() gives it back"),
        LedgerRow(row="context", bytes=620 * MIB, detail="CUDA context, kernels and libraries"),
    ]
    yield Ledger(device=device, total=sum(row.bytes for row in rows), source="cudaMemGetInfo", rows=rows)
    rows = [
        LedgerRow(row="malloc in use", bytes=3 * GIB),
        LedgerRow(row="libraries", bytes=6 * GIB, detail="code and data of shared objects"),
    ]
    yield Ledger(device="host", total=sum(row.bytes for row in rows), source="/proc/self/smaps", rows=rows)


def _leak(rank: int, device: str, steps: int) -> RecordedFinding:
    finding = Finding(
        kind="leak",
        device=device,
        rank=rank,
        bytes=LEAK * steps,
        bytes_per_step=LEAK,
        holder="train.losses['lm'][*] -> grad_fn WrapBackward",
        allocated_at="train.py:142 in loss_func",
        mechanism="Each step's loss still carries its graph.",
        fix="Store `loss.detach()` or `loss.item()` instead of the loss.",
        playbook="M21",
        step=steps,
        evidence=[f"allocated rose at each of {steps - 3} steps"],
    )
    fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
    return RecordedFinding(**fields, final=True)


# Reporting


@dataclass(frozen=True, slots=True)
class Row:
    """One way to report: wall seconds, seconds of all cores, and the highest resident set in bytes."""

    way: str
    cache: str
    repeats: int
    fastest_s: float
    median_s: float
    slowest_s: float
    cores_s: float
    peak_rss: int
    output: int


def main() -> None:
    args = _arguments()
    job = Job(args.ranks, args.marks)
    with tempfile.TemporaryDirectory(prefix="memtriage-many-") as scratch:
        directory = args.keep or Path(scratch) / "records"
        if not directory.exists():
            began = time.perf_counter()
            make(job, directory)
            print(f"made {job.ranks:,} ranks x {job.marks:,} marks in {time.perf_counter() - began:.1f} s")
        files = sorted(directory.rglob("rank-*.jsonl"))
        newest = [file for file in files if file.parent.name == str(RESTARTS)]
        total = sum(file.stat().st_size for file in newest)
        print(
            f"{len(newest):,} files of the newest attempt, {total / MIB:,.0f} MiB; {_machine()}", flush=True
        )
        page = Path(scratch) / "report.html"
        ways = {"terminal": [], "--json": ["--json"], "--html": ["--html", str(page)]}
        rows = []
        for way, options in ways.items():
            for cache in ("warm", "cold"):
                rows.append(_measured(way, options, cache, directory, newest, args.repeats))
                print(_line(rows[-1]), flush=True)
        print(f"the page: {page.stat().st_size / MIB:.2f} MiB")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _measured(
    way: str, options: list[str], cache: str, directory: Path, files: list[Path], repeats: int
) -> Row:
    seconds, cores, peaks, output = [], [], [], 0
    for _ in range(repeats):
        if cache == "cold":
            _drop(files)
        else:
            for file in files:
                file.read_bytes()
        figures, output = _report(directory, options)
        seconds.append(figures["seconds"])
        cores.append(figures["cores_s"])
        peaks.append(figures["peak_rss"])
    wall = (min(seconds), statistics.median(seconds), max(seconds))
    return Row(way, cache, repeats, *wall, min(cores), round(max(peaks)), output)


def _report(directory: Path, options: list[str]) -> tuple[dict[str, float], int]:
    """Run one report in a fresh process, through a small one whose children are only that."""
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, __file__, "--one", str(directory), *options]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stderr.splitlines()[-1]), os.fstat(out.fileno()).st_size


def _one(arguments: list[str]) -> None:
    began = time.perf_counter()
    command = [sys.executable, "-m", "memtriage", "report", *arguments]
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "seconds": seconds,
        "cores_s": used.ru_utime + used.ru_stime,
        "peak_rss": used.ru_maxrss * 1024,
    }
    print(json.dumps(figures), file=sys.stderr)


def _drop(files: list[Path]) -> None:
    os.sync()
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}"


def _line(row: Row) -> str:
    return (
        f"{row.way:9} {row.cache:5} {row.fastest_s:6.2f} {row.median_s:6.2f} {row.slowest_s:6.2f} s  "
        f"of all cores {row.cores_s:.2f} s  "
        f"{row.peak_rss / MIB:6.0f} MiB  output {row.output / MIB:.1f} MiB"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--marks", type=int, default=1000, help="lines of marks of each rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="make the records there, and take them from there")
    parser.add_argument("--json", type=Path, help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2:])
    else:
        main()
