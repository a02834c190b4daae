"""What a diagnosis rests on: the sums of the figures, and the comparison or the words that decide."""

from __future__ import annotations

import pytest

from memtriage.messages.case import Case
from memtriage.messages.evidence import evidence
from memtriage.messages.grammar.message import Message
from memtriage.messages.shapes import Product
from support.message_cases import GIB, MIB, device_case, sizes_case, text_case


@pytest.mark.parametrize(
    ("case", "sentences"),
    [
        (
            device_case("does_not_fit", free=GIB, allocated=76 * GIB, reserved_unallocated=GIB),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "76.00 GiB allocated + 1024.00 MiB in holes (reserved but unallocated) + 1024.00 MiB "
                    "free + 2.00 GiB outside this process's allocator = 80.00 GiB, the device"
                ),
                "live bytes fill 95% of the device; closing every hole would leave 0 bytes, 0.0% of it",
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit", requested=2 * GIB + 1, free=GIB, allocated=77 * GIB, reserved_unallocated=GIB
            ),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1.00 GiB short",
                (
                    "77.00 GiB allocated + 1024.00 MiB in holes (reserved but unallocated) + 1024.00 MiB "
                    "free + 1024.00 MiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "1024.00 MiB free + 1024.00 MiB in holes = 2.00 GiB: even with every hole closed the "
                    "request exceeds it by 1 bytes"
                ),
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        (
            device_case("does_not_fit", free=GIB, allocated=78 * GIB - 64 * MIB, reserved_unallocated=GIB),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "77.94 GiB allocated + 1024.00 MiB in holes (reserved but unallocated) + 1024.00 MiB "
                    "free + 64.00 MiB outside this process's allocator = 80.00 GiB, the device"
                ),
                "live bytes fill 97% of the device; closing every hole would leave 0 bytes, 0.0% of it",
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit", free=GIB, allocated=78 * GIB - 64 * MIB + 1, reserved_unallocated=GIB
            ),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "77.94 GiB allocated + 1024.00 MiB in holes (reserved but unallocated) + 1024.00 MiB "
                    "free = 80.00 GiB, the device"
                ),
                "live bytes fill 97% of the device; closing every hole would leave 0 bytes, 0.0% of it",
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit", requested=80 * GIB, free=GIB, allocated=79 * GIB, reserved_unallocated=0
            ),
            [
                "requested 80.00 GiB; 1024.00 MiB free: 79.00 GiB short",
                (
                    "79.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 1024.00 MiB free = "
                    "80.00 GiB, the device"
                ),
                (
                    "1024.00 MiB free + 0 bytes in holes = 1024.00 MiB: even with every hole closed the "
                    "request exceeds it by 79.00 GiB"
                ),
                "to fit with 5 % of the device to spare, free 83.00 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit", requested=80 * GIB + 1, free=GIB, allocated=79 * GIB, reserved_unallocated=0
            ),
            [
                "requested 80.00 GiB; 1024.00 MiB free: 79.00 GiB short",
                (
                    "79.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 1024.00 MiB free = "
                    "80.00 GiB, the device"
                ),
                "the request alone exceeds the device: no state of the device could hold it",
            ],
        ),
        (
            device_case("does_not_fit", free=GIB, allocated=79 * GIB, reserved_unallocated=None),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                "the device has 80.00 GiB: 79.00 GiB allocated, 1024.00 MiB free",
                "the text ends inside of the allocated bytes, which fill the device if they are GiB",
                "to fit with 5 % of the device to spare, free 5.00 GiB",
                "not in the text: reserved unallocated",
            ],
        ),
        (
            device_case("does_not_fit", "xpu-v2", allocated=79 * GIB, reserved_unallocated=0),
            [
                "requested 2.00 GiB",
                (
                    "the device has 80.00 GiB: 79.00 GiB allocated, 0 bytes in holes (reserved but "
                    "unallocated)"
                ),
                "79.00 GiB allocated + 2.00 GiB requested exceed the device by 1024.00 MiB",
            ],
        ),
        (
            device_case("does_not_fit", free=8 * GIB, allocated=70 * GIB, reserved_unallocated=0),
            [
                "requested 2.00 GiB; 8.00 GiB free: the free memory covers it",
                (
                    "70.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 8.00 GiB free + "
                    "2.00 GiB outside this process's allocator = 80.00 GiB, the device"
                ),
                "live bytes fill 88% of the device; closing every hole would leave 6.00 GiB, 7.5% of it",
                "to fit with 5 % of the device to spare, free 0 bytes",
            ],
        ),
        (
            device_case("fragmentation", free=GIB, allocated=60 * GIB, reserved_unallocated=18 * GIB),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "60.00 GiB allocated + 18.00 GiB in holes (reserved but unallocated) + 1024.00 MiB free "
                    "+ 1024.00 MiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "18.00 GiB is free in holes of segments that are partly in use, none of them large "
                    "enough for 2.00 GiB: wholly free segments had been released before the message"
                ),
            ],
        ),
        (
            device_case(
                "other_process_or_outside_allocator", free=GIB, allocated=30 * GIB, reserved_unallocated=GIB
            ),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "30.00 GiB allocated + 1024.00 MiB in holes (reserved but unallocated) + 1024.00 MiB "
                    "free + 48.00 GiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "48.00 GiB outside the allocator are 60% of the device; one process's context and "
                    "libraries take about 0.75 GiB (measured on an H200)"
                ),
            ],
        ),
        (
            device_case(
                "allocator_limit",
                free=60 * GIB,
                allocated=18 * GIB,
                reserved_unallocated=GIB,
                allowed=20 * GIB,
            ),
            [
                "requested 2.00 GiB; 60.00 GiB free: the free memory covers it",
                (
                    "18.00 GiB allocated + 1024.00 MiB in holes (reserved but unallocated) + 60.00 GiB free "
                    "+ 1024.00 MiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "19.00 GiB reserved + 2.00 GiB requested exceed the cap of 20.00 GiB on this process; "
                    "the device has 80.00 GiB"
                ),
            ],
        ),
        (
            device_case("allocator_limit", free=60 * GIB, allocated=18 * GIB, allowed=20 * GIB),
            [
                "requested 2.00 GiB; 60.00 GiB free: the free memory covers it",
                "the device has 80.00 GiB: 18.00 GiB allocated, 60.00 GiB free",
                (
                    "18.00 GiB reserved + 2.00 GiB requested exceed the cap of 20.00 GiB on this process; "
                    "the device has 80.00 GiB"
                ),
            ],
        ),
        (
            device_case(
                "driver_refused_though_free", free=60 * GIB, allocated=18 * GIB, reserved_unallocated=GIB
            ),
            [
                "requested 2.00 GiB; 60.00 GiB free: the driver refused though memory was free",
                (
                    "18.00 GiB allocated + 1024.00 MiB in holes (reserved but unallocated) + 60.00 GiB free "
                    "+ 1024.00 MiB outside this process's allocator = 80.00 GiB, the device"
                ),
            ],
        ),
        (
            device_case(
                "driver_refused_though_free", "xpu-v2", allocated=18 * GIB, reserved_unallocated=20 * GIB
            ),
            [
                "requested 2.00 GiB",
                (
                    "the device has 80.00 GiB: 18.00 GiB allocated, 20.00 GiB in holes (reserved but "
                    "unallocated)"
                ),
                (
                    "38.00 GiB reserved + 2.00 GiB requested is 50% of the device; the message does not say "
                    "what was free"
                ),
            ],
        ),
        (
            device_case("driver_refused_though_free", "xpu-v2", allocated=18 * GIB),
            [
                "requested 2.00 GiB",
                "the device has 80.00 GiB: 18.00 GiB allocated",
                (
                    "18.00 GiB reserved + 2.00 GiB requested is 25% of the device; the message does not say "
                    "what was free"
                ),
            ],
        ),
        (
            device_case(
                "private_pools", free=GIB, allocated=77 * GIB, reserved_unallocated=0, private_pools=3 * GIB
            ),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "77.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 1024.00 MiB free + "
                    "2.00 GiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "3.00 GiB is free but parked in private pools (CUDA graphs), which no other pool may "
                    "use; 74.00 GiB is live"
                ),
            ],
        ),
        (
            device_case("system_memory_fallback", free=0, allocated=90 * GIB, reserved_unallocated=0),
            [
                "requested 2.00 GiB; 0 bytes free: 2.00 GiB short",
                (
                    "the device has 80.00 GiB: 90.00 GiB allocated, 0 bytes in holes (reserved but "
                    "unallocated), 0 bytes free"
                ),
                (
                    "90.00 GiB allocated on a device of 80.00 GiB: 10.00 GiB have spilled to system memory; "
                    "the free figure means nothing"
                ),
            ],
        ),
        (
            device_case("unknown", free=GIB),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                "the device has 80.00 GiB: 1024.00 MiB free",
                "the figures in the text do not show the cause",
            ],
        ),
        (
            device_case("absurd_request", requested=2**47, free=GIB),
            [
                "requested 131072.00 GiB",
                "the device has 80.00 GiB: 1024.00 MiB free",
                "no machine has that much: a length or an index became this size",
            ],
        ),
        (
            device_case("unknown", total=None, free=GIB),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                "the figures in the text do not show the cause",
            ],
        ),
        # Processes
        (
            device_case(
                "does_not_fit",
                free=GIB,
                allocated=76 * GIB,
                reserved_unallocated=0,
                this_process=77 * GIB,
                processes=[{"pid": 7, "in_use": 2 * GIB}, {"pid": 8, "in_use": None}],
            ),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "76.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 1024.00 MiB free + "
                    "3.00 GiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "1024.00 MiB free + 0 bytes in holes = 1024.00 MiB: even with every hole closed the "
                    "request exceeds it by 1024.00 MiB"
                ),
                "other processes have 2.00 GiB on the device: pid 7 (2.00 GiB)",
                (
                    "this process has 77.00 GiB on the device, 1024.00 MiB of it not the allocator's "
                    "(context, libraries, NCCL)"
                ),
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit",
                free=GIB,
                allocated=78 * GIB,
                reserved_unallocated=0,
                this_process=78 * GIB + 64 * MIB,
            ),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "78.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 1024.00 MiB free + "
                    "1024.00 MiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "1024.00 MiB free + 0 bytes in holes = 1024.00 MiB: even with every hole closed the "
                    "request exceeds it by 1024.00 MiB"
                ),
                (
                    "this process has 78.06 GiB on the device, 64.00 MiB of it not the allocator's (context, "
                    "libraries, NCCL)"
                ),
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit",
                free=GIB,
                allocated=78 * GIB,
                reserved_unallocated=0,
                this_process=78 * GIB + 64 * MIB - 1,
            ),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                (
                    "78.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 1024.00 MiB free + "
                    "1024.00 MiB outside this process's allocator = 80.00 GiB, the device"
                ),
                (
                    "1024.00 MiB free + 0 bytes in holes = 1024.00 MiB: even with every hole closed the "
                    "request exceeds it by 1024.00 MiB"
                ),
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        (
            device_case("does_not_fit", free=GIB, allocated=78 * GIB, this_process=79 * GIB),
            [
                "requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short",
                "the device has 80.00 GiB: 78.00 GiB allocated, 1024.00 MiB free",
                (
                    "1024.00 MiB free + 0 bytes in holes = 1024.00 MiB: even with every hole closed the "
                    "request exceeds it by 1024.00 MiB"
                ),
                "to fit with 5 % of the device to spare, free 5.00 GiB",
            ],
        ),
        # Requests that the allocator rounds
        (
            device_case(
                "does_not_fit", requested=2 * MIB, free=0, allocated=80 * GIB, reserved_unallocated=0
            ),
            [
                "requested 2.00 MiB; 0 bytes free: 2.00 MiB short",
                (
                    "80.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 0 bytes free = "
                    "80.00 GiB, the device"
                ),
                (
                    "0 bytes free + 0 bytes in holes = 0 bytes: even with every hole closed the request "
                    "exceeds it by 2.00 MiB"
                ),
                (
                    "2.00 MiB is what the allocator asks for any tensor of up to 1 MiB: it does not show the "
                    "shape"
                ),
                "to fit with 5 % of the device to spare, free 4.00 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit",
                "hip-v2",
                requested=20 * MIB,
                free=0,
                allocated=80 * GIB,
                reserved_unallocated=0,
            ),
            [
                "requested 20.00 MiB; 0 bytes free: 20.00 MiB short",
                (
                    "80.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 0 bytes free = "
                    "80.00 GiB, the device"
                ),
                (
                    "0 bytes free + 0 bytes in holes = 0 bytes: even with every hole closed the request "
                    "exceeds it by 20.00 MiB"
                ),
                (
                    "20.00 MiB is what the allocator asks for any tensor of 1 to 10 MiB: it does not show "
                    "the shape"
                ),
                "to fit with 5 % of the device to spare, free 4.02 GiB",
            ],
        ),
        (
            device_case(
                "does_not_fit",
                "xpu-v2",
                requested=20 * MIB,
                free=0,
                allocated=80 * GIB,
                reserved_unallocated=0,
            ),
            [
                "requested 20.00 MiB; 0 bytes free: 20.00 MiB short",
                (
                    "80.00 GiB allocated + 0 bytes in holes (reserved but unallocated) + 0 bytes free = "
                    "80.00 GiB, the device"
                ),
                (
                    "0 bytes free + 0 bytes in holes = 0 bytes: even with every hole closed the request "
                    "exceeds it by 20.00 MiB"
                ),
                "to fit with 5 % of the device to spare, free 4.02 GiB",
            ],
        ),
        # Metal
        (
            sizes_case(
                "allocator_limit",
                "mps",
                "",
                "mps",
                allocated=8 * GIB,
                other=GIB,
                requested=GIB,
                max_allowed=9 * GIB,
            ),
            [
                (
                    "8.00 GiB allocated + 1024.00 MiB other Metal memory of this process + 1024.00 MiB "
                    "requested = 10.00 GiB, over the limit of 9.00 GiB"
                )
            ],
        ),
        (
            sizes_case("does_not_fit", "mps", "", "mps", allocated=8 * GIB, other=GIB, requested=GIB),
            [
                (
                    "8.00 GiB allocated + 1024.00 MiB other Metal memory of this process + 1024.00 MiB "
                    "requested = 10.00 GiB"
                )
            ],
        ),
        (
            sizes_case("does_not_fit", "mps", "buffer", "mps", requested=48 * GIB),
            ["requested 48.00 GiB", "one buffer over the device's limit for a single buffer"],
        ),
        (sizes_case("does_not_fit", "mps", "", "mps"), []),
    ],
)
def test_what_is_told_of_a_device(case: Case, sentences: list[str]) -> None:
    assert evidence(case) == sentences


@pytest.mark.parametrize(
    ("case", "sentences"),
    [
        (
            sizes_case("host_alloc_failed", "cpu-alloc", requested=4096),
            ["requested 4.00 KiB (exactly)", "a host allocation failed: GPU memory is not involved"],
        ),
        (
            sizes_case("host_alloc_failed", "python-alloc", "worker", requested=4096),
            [
                "requested 4.00 KiB",
                "a host allocation failed in a DataLoader worker: GPU memory is not involved",
            ],
        ),
        (
            sizes_case("absurd_request", "python-alloc", requested=2**50),
            ["requested 1048576.00 GiB", "no machine has that much: a length or an index became this size"],
        ),
        (
            text_case("host_memory_limit", "kernel-oom"),
            ["the kernel's out-of-memory killer killed a process: memory ran out"],
        ),
        (
            text_case("host_memory_limit", "kernel-oom", constraint="CONSTRAINT_NONE", comm="python", pid=7),
            [
                (
                    "the kernel's out-of-memory killer killed python (pid 7): the whole machine was out of "
                    "memory"
                )
            ],
        ),
        (
            sizes_case("host_memory_limit", "kernel-oom", "cgroup", anon_rss=GIB, file_rss=0, shmem_rss=GIB),
            [
                "the kernel's out-of-memory killer killed a process: a cgroup was at its limit",
                "a process had 1024.00 MiB of its own, 1024.00 MiB shared in memory",
            ],
        ),
        (
            sizes_case(
                "host_memory_limit", "kernel-oom", "cgroup", anon_rss=GIB, file_rss=MIB, shmem_rss=GIB + 1
            ),
            [
                "the kernel's out-of-memory killer killed a process: a cgroup was at its limit",
                "a process had 1024.00 MiB of its own, 1024.00 KiB of files, 1.00 GiB shared in memory",
                "most of it is shared memory: /dev/shm, or pinned buffers",
            ],
        ),
        (
            sizes_case("host_memory_limit", "kernel-oom", anon_rss=GIB, shmem_rss=2 * GIB),
            [
                "the kernel's out-of-memory killer killed a process: memory ran out",
                "a process had 1024.00 MiB of its own, 2.00 GiB shared in memory",
            ],
        ),
        (
            sizes_case("host_memory_limit", "oomd", rss=4 * GIB),
            [
                "a memory monitor (systemd-oomd, earlyoom, Dask) killed it before the kernel had to",
                "the process had 4.00 GiB in memory",
            ],
        ),
        (
            Case(Message("oomd", fields={"rss": 4 * GIB}, facts={"comm": "python3"}), ("host_memory_limit",)),
            [
                "a memory monitor (systemd-oomd, earlyoom, Dask) killed it before the kernel had to",
                "python3 had 4.00 GiB in memory",
            ],
        ),
        (
            text_case("killed_unproven", "launcher", "killed"),
            ["many programs send SIGKILL; nothing in the text shows that memory was the reason"],
        ),
        (
            text_case("not_memory", "shm", "descriptors"),
            ["too many open files (errno 24): file descriptors ran out, not memory"],
        ),
        (text_case("not_memory", "not-memory", "a form that has no words"), []),
        # Ray
        (
            sizes_case("host_memory_limit", "ray", node_used=9 * GIB),
            [
                "Ray's memory monitor killed the worker: the node's host memory, not the GPU's",
                "the node used 9.00 GiB",
            ],
        ),
        (
            sizes_case("host_memory_limit", "ray", node_used=9 * GIB, node_total=10 * GIB, task_used=GIB),
            [
                "Ray's memory monitor killed the worker: the node's host memory, not the GPU's",
                "the node used 9.00 GiB of 10.00 GiB",
                "the killed task had 1024.00 MiB",
            ],
        ),
        (
            Case(
                Message(
                    "ray",
                    fields={"node_used": 9 * GIB, "node_total": 10 * GIB},
                    facts={"fraction": "0.902", "threshold": "0.85"},
                ),
                ("host_memory_limit",),
            ),
            [
                "Ray's memory monitor killed the worker: the node's host memory, not the GPU's",
                "the node used 9.00 GiB of 10.00 GiB (90%, allowed 85%)",
            ],
        ),
        (
            sizes_case("host_memory_limit", "ray", task_used=GIB),
            ["Ray's memory monitor killed the worker: the node's host memory, not the GPU's"],
        ),
        # Engines
        (
            sizes_case(
                "other_process_or_outside_allocator",
                "vllm",
                "startup",
                "cuda:0",
                free=10 * GIB,
                total=80 * GIB,
                desired=72 * GIB,
            ),
            [
                (
                    "10.00 GiB free of 80.00 GiB before the engine started; it wants 72.00 GiB: 70.00 GiB is "
                    "in use by other processes, or by this process outside the engine"
                )
            ],
        ),
        (
            sizes_case("does_not_fit", "vllm", "length", "cuda:0", kv_needed=16 * GIB, kv_available=10 * GIB),
            [
                "one sequence of full length does not fit into the key-value cache",
                "the cache needs 16.00 GiB and has 10.00 GiB: 6.00 GiB short",
            ],
        ),
        (
            text_case("does_not_fit", "vllm", "length", max_seq_len=131072, kv_tokens=65536),
            [
                "one sequence of full length does not fit into the key-value cache",
                "one sequence may have 131,072 tokens, the cache holds 65,536",
            ],
        ),
        (
            sizes_case(
                "informational",
                "vllm",
                "breakdown",
                "cuda:0",
                weights=13 * GIB,
                non_torch=GIB,
                activation_peak=None,
            ),
            [
                "a report of memory at start-up (CUDA graphs are not in it), no failure",
                "13.00 GiB weights + 1024.00 MiB non torch",
            ],
        ),
        (
            sizes_case("informational", "deepspeed-mem", MA=GIB, Max_MA=2 * GIB, CA=3 * GIB, Max_CA=None),
            [
                "a report of memory, no failure",
                "1024.00 MiB allocated, 2.00 GiB at its peak, 3.00 GiB reserved",
            ],
        ),
        # Other runtimes
        (
            sizes_case("informational", "allocation", "survived", None, requested=GIB),
            [
                "requested 1024.00 MiB",
                "the text says that the program continues without that memory: not a failure",
            ],
        ),
        (
            Case(Message("allocation", form="failed", facts={"shape_bytes": 131072}), ("unknown",)),
            [
                "requested 128.00 KiB: the product of the shape and its type",
                "the text shows neither what was free nor what used the rest",
            ],
        ),
        (
            sizes_case("unknown", "allocation", "failed", None, requested=GIB),
            ["requested 1024.00 MiB", "the text shows neither what was free nor what used the rest"],
        ),
        (
            sizes_case("does_not_fit", "allocation", "failed", "tpu", used=9 * GIB, total=8 * GIB),
            ["needs 9.00 GiB of 8.00 GiB: 1024.00 MiB too much"],
        ),
        (
            sizes_case("does_not_fit", "allocation", "failed", "tpu", used=8 * GIB, total=8 * GIB),
            ["needs 8.00 GiB of 8.00 GiB"],
        ),
        (
            sizes_case("does_not_fit", "allocation", "failed", None, requested=9 * GIB, total=8 * GIB),
            ["requested 9.00 GiB", "the request alone exceeds the total of 8.00 GiB"],
        ),
        (
            sizes_case("unknown", "allocation", "failed", None, requested=8 * GIB, total=8 * GIB),
            ["requested 8.00 GiB"],
        ),
        (
            sizes_case("does_not_fit", "allocation", "single", None, requested=9 * GIB, max_buffer=8 * GIB),
            ["requested 9.00 GiB", "one buffer may have 8.00 GiB at most on this device, whatever is free"],
        ),
        (
            sizes_case("does_not_fit", "allocation", "single", None, requested=9 * GIB),
            [
                "requested 9.00 GiB",
                "one buffer is over the device's limit for a single buffer, whatever is free",
            ],
        ),
        (
            sizes_case(
                "allocator_limit",
                "allocation",
                "failed",
                None,
                requested=GIB,
                allocated=8 * GIB,
                allowed=8 * GIB,
            ),
            ["requested 1024.00 MiB", "8.00 GiB allocated before, with a limit of 8.00 GiB"],
        ),
        (
            sizes_case("unknown", "allocation", "failed", None, requested=GIB, allocated=8 * GIB),
            [
                "requested 1024.00 MiB",
                "8.00 GiB allocated before",
                "the text shows neither what was free nor what used the rest",
            ],
        ),
        (
            sizes_case("does_not_fit", "allocation", "failed", None, requested=2 * GIB, free=GIB),
            ["requested 2.00 GiB; 1024.00 MiB free: 1024.00 MiB short"],
        ),
        (
            sizes_case("host_alloc_failed", "allocation", "failed", "host", requested=2 * GIB),
            ["requested 2.00 GiB", "the request is for host memory: GPU memory is not involved"],
        ),
        # What is known besides
        (
            Case(Message("cublas"), ("library_alloc_failed",), phase="backward"),
            [
                "the library got no memory from the driver for its handle or workspace",
                "the traceback is of a backward pass: gradients come on top of every saved activation",
            ],
        ),
        (
            Case(
                Message("cpu-alloc", fields={"requested": 4096}, missing=("total", "reserved_unallocated")),
                ("host_alloc_failed",),
                phase="setup",
            ),
            [
                "requested 4.00 KiB (exactly)",
                "a host allocation failed: GPU memory is not involved",
                "the traceback is of loading or moving weights, before any training",
                "not in the text: total, reserved unallocated",
            ],
        ),
        (
            Case(
                Message("cpu-alloc", fields={"requested": 64 * GIB}),
                ("host_alloc_failed",),
                product=Product("64.00 GiB = a x b", ("seq", "vocab"), 4),
                shapes={"vocab": 2**20},
            ),
            [
                "64.00 GiB = a x b: fp32 logits",
                "requested 64.00 GiB (exactly)",
                "a host allocation failed: GPU memory is not involved",
            ],
        ),
        (
            Case(
                Message("cpu-alloc", fields={"requested": 64 * GIB}),
                ("host_alloc_failed",),
                product=Product("64.00 GiB = a x b", ("a", "b"), 4),
            ),
            [
                "64.00 GiB = a x b",
                "requested 64.00 GiB (exactly)",
                "a host allocation failed: GPU memory is not involved",
            ],
        ),
        (
            Case(
                Message("cpu-alloc", fields={"requested": 64 * GIB}),
                ("host_alloc_failed",),
                shapes={"vocab": 2**20},
            ),
            [
                "64.00 GiB would be 16,384 x 1,048,576 x 4 bytes: fp32 logits of 16,384 tokens",
                "requested 64.00 GiB (exactly)",
                "a host allocation failed: GPU memory is not involved",
            ],
        ),
    ],
)
def test_what_is_told_of_a_text(case: Case, sentences: list[str]) -> None:
    assert evidence(case) == sentences
