"""What a census in a copy of the process costs the program, and whether all copies answer.

    python benchmarks/copies.py [--device cpu|cuda] [--gib 2 20] [--objects 400000] [--copies 10000]
                                [--pinned GIB] [--pinned-by cudaHostAlloc|cudaHostRegister]

pause    A program with so many Python objects and so much resident memory trains. In turns it stands still
         for a census in the process and for a copy that takes one; then its next steps are timed, while the
         copy works and pages are copied. On CUDA, a step sends pinned memory to the GPU and back.
answers  Copies that walk the heap, one after the other, while eight threads run Python, and eight more
         allocate, free and run backwards. How many answered, and whether a process, a descriptor or memory is
         left.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import threading
import time
from pathlib import Path

import torch

from memtriage.process import copies
from memtriage.process.copies import work_in_copy
from memtriage.session.remote.take import answer_in_copy, take_answer

GIB, MIB = 1 << 30, 1 << 20
ROUNDS = 3
STEPS = 30
WITHIN_S = 120.0


class Training:
    """A small model, many objects and much memory, of which a step rewrites some MiB."""

    def __init__(self, device: str, gib: float, objects: int, pinned: float, pinned_by: str) -> None:
        self.device = device
        self.objects = [{"number": i, "value": [i]} for i in range(objects // 2)]
        self.resident = torch.ones(int(gib * GIB) // 4)
        self.pinned = torch.empty(0)
        if device == "cuda":
            registers = pinned_by == "cudaHostRegister"
            self.pinned = torch.ones(int(pinned * GIB) // 4, pin_memory=not registers)
            if registers:
                status = torch.cuda.cudart().cudaHostRegister(self.pinned.data_ptr(), self.pinned.nbytes, 0)
                assert int(status) == 0
        self.sent = self.pinned[: 64 * MIB // 4]
        layers = [torch.nn.Linear(512, 512, device=device) for _ in range(8)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> float:
        """Return the seconds of a step."""
        started = time.perf_counter()
        loss = self.model(torch.randn(64, 512, device=self.device)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sent.copy_(self.sent.to(self.device, non_blocking=True), non_blocking=True)
        loss.item()
        return time.perf_counter() - started


def resident() -> int:
    """Return the bytes of the resident set."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def pause(training: Training) -> None:
    """Print one row per round: how long the program stood still, and its steps after that."""
    usual = statistics.median(training.step() for _ in range(2 * STEPS))
    tracked = len(gc.get_objects())
    print(f"{resident() / GIB:.1f} GiB resident, {tracked:,} objects tracked, {training.device}, ms")
    print(f"  step as usual {milliseconds(usual)}")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        inside = take_answer({}, None)
        stood_inside = time.perf_counter() - started
        training.step()
        started = time.perf_counter()
        copy = answer_in_copy({}, None, follow=False)
        stood = time.perf_counter() - started
        if copy is None:
            print(f"  in the process {milliseconds(stood_inside)}; no copy is made")
            continue
        steps = [training.step() for _ in range(STEPS)]
        answer = copy.result(WITHIN_S)
        took = time.perf_counter() - started
        assert inside is not None
        same = answer is not None and f'"nodes":{inside.nodes}'.encode() in answer
        print(
            f"  in the process {milliseconds(stood_inside)}; in a copy {milliseconds(stood)}, answer after "
            f"{milliseconds(took)} ({'same' if same else 'LOST'}); steps meanwhile median "
            f"{milliseconds(statistics.median(steps))}, worst {milliseconds(max(steps))}",
            flush=True,
        )


def answers(count: int) -> None:
    """Print how many of so many copies answered while threads do what can stop one."""
    stop = threading.Event()

    def python() -> None:
        while not stop.is_set():
            sum(range(1000))

    def allocate() -> None:
        while not stop.is_set():
            del [bytearray(3000 + size) for size in range(50)][:]

    def backward() -> None:
        model = torch.nn.Linear(64, 64)
        while not stop.is_set():
            model(torch.randn(8, 64)).sum().backward()

    works = [python] * 8 + [allocate] * 4 + [backward] * 4
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    objects = [{"number": i} for i in range(20_000)]

    def work() -> bytes:
        reached = sum(len(gc.get_referents(each)) for each in objects)
        return (
            f"{reached} {len(Path('/proc/self/stat').read_bytes()) > 0} {len(bytearray(5_000_000))}".encode()
        )

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), resident() >> 20

    answered, longest, before = 0, 0.0, left()
    for number in range(1, count + 1):
        started = time.perf_counter()
        copy = work_in_copy(work)
        longest = max(longest, time.perf_counter() - started)
        answered += copy is not None and copy.result(WITHIN_S) is not None
        copies._lost = 0
        if number % max(1, count // 20) == 0:
            print(
                f"  {answered:,} of {number:,} answered; stood still at most {milliseconds(longest)} ms; "
                f"descriptors and MiB {before} -> {left()}",
                flush=True,
            )
    stop.set()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gib", type=float, nargs="*", default=[1.0])
    parser.add_argument("--objects", type=int, default=400_000)
    parser.add_argument("--pinned", type=float, default=1.0)
    parser.add_argument("--pinned-by", choices=("cudaHostAlloc", "cudaHostRegister"), default="cudaHostAlloc")
    parser.add_argument("--copies", type=int, default=1_000)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} processors, {time.strftime('%Y-%m-%d')}")
    for gib in arguments.gib:
        pause(Training(arguments.device, gib, arguments.objects, arguments.pinned, arguments.pinned_by))
    if arguments.copies:
        answers(arguments.copies)


if __name__ == "__main__":
    main()
