"""Messages of the device allocators: each figure, whatever is missing, and whose message it is."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.find import find
from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # CUDA, 2.x
        (
            "torch.OutOfMemoryError: «CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has "
            "a total capacity of 79.00 GiB of which 1.00 GiB is free. Process 7 has 1.00 MiB "
            "memory in use. Including non-PyTorch memory, this process has 78.00 GiB memory in "
            "use. 40.00 GiB allowed; Of the allocated memory 39.00 GiB is allocated by PyTorch, "
            "with 2.00 MiB allocated in private pools (e.g., CUDA Graphs), and 3.00 MiB is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
            "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)»",
            Message(
                "cuda-v2",
                fields={
                    "requested": 2147483648,
                    "total": 84825604096,
                    "free": 1073741824,
                    "allocated": 41875931136,
                    "private_pools": 2097152,
                    "reserved_unallocated": 3145728,
                    "allowed": 42949672960,
                    "this_process": 83751862272,
                    "processes": [{"pid": 7, "in_use": 1048576}],
                },
                facts={"hint": "PYTORCH_ALLOC_CONF=expandable_segments:True"},
                device="cuda:1",
            ),
        ),
        (
            "«CUDA out of memory. Tried to allocate 2.00 GiB. this process has 0 bytes» memory in use",
            Message(
                "cuda-v2",
                fields={"requested": 2147483648, "this_process": None},
                missing=("total", "free", "allocated", "reserved_unallocated"),
            ),
        ),
        (
            "«CUDA out of memory». GPU 1 has",
            Message(
                "cuda-v2",
                device="cuda:1",
                missing=("requested", "total", "free", "allocated", "reserved_unallocated"),
            ),
        ),
        (
            "«CUDA out of memory. Tried to» allocate x GPU has a total capacity of x of which x "
            "Of the allocated memory x this process has x",
            Message(
                "cuda-v2",
                fields={
                    "requested": None,
                    "total": None,
                    "free": None,
                    "allocated": None,
                    "this_process": None,
                },
                missing=("requested", "total", "free", "allocated", "reserved_unallocated"),
            ),
        ),
        (
            "«Tried to allocate 2.00 GiB. GPU 12 has a total capacity of 79.00 GiB of which 1.00 "
            "GiB» is free. Of the allocated memory 7",
            Message(
                "cuda-v2",
                fields={"requested": 2147483648, "total": 84825604096, "free": 1073741824, "allocated": None},
                facts={"allocated_cut": "7"},
                device="cuda:12",
                missing=("allocated", "reserved_unallocated"),
            ),
        ),
        (
            "«CUDA out of memory. Tried to» allocate more than 1EB memory.",
            Message(
                "cuda-v2",
                fields={"requested": None},
                facts={"absurd": "more than 1EB"},
                missing=("requested", "total", "free", "allocated", "reserved_unallocated"),
            ),
        ),
        (
            "RuntimeError: «CUDA out of memory»",
            Message("cuda-v2", missing=("requested", "total", "free", "allocated", "reserved_unallocated")),
        ),
        # CUDA, 1.x and 0.x
        (
            "«CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; "
            "6.50 GiB already allocated; 10.00 MiB free; 6.60 GiB reserved in total by PyTorch)» "
            "If reserved memory",
            Message(
                "cuda-v1",
                fields={
                    "requested": 20971520,
                    "total": 8514772664,
                    "free": 10485760,
                    "allocated": 6979321856,
                    "reserved": 7086696038,
                },
                device="cuda:0",
            ),
        ),
        (
            "«CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; "
            "6.50 GiB already allocated; 10.00 MiB free; 60.00 MiB cached)»",
            Message(
                "cuda-v1",
                fields={
                    "requested": 20971520,
                    "total": 8514772664,
                    "free": 10485760,
                    "allocated": 6979321856,
                    "cached": 62914560,
                },
                device="cuda:0",
            ),
        ),
        (
            "«CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; "
            "10.00 MiB free; 6.60 GiB reserved in total by PyTorch) If reserved memory is >> "
            "allocated memory try setting max_split_size_mb» to",
            Message(
                "cuda-v1",
                fields={"requested": 20971520, "total": 8514772664, "free": 10485760, "reserved": 7086696038},
                facts={"hint": "max_split_size_mb"},
                device="cuda:0",
                missing=("allocated",),
            ),
        ),
        # Other devices
        (
            "«HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.98 "
            "GiB of which 1.40 GiB is free. Of the allocated memory 1.26 GiB is allocated by "
            "PyTorch, and 152.50 MiB is reserved by PyTorch but unallocated.»",
            Message(
                "hip-v2",
                fields={
                    "requested": 2147483648,
                    "total": 17158394348,
                    "free": 1503238554,
                    "allocated": 1352914698,
                    "reserved_unallocated": 159907840,
                },
                device="cuda:0",
            ),
        ),
        (
            "Error: «Tried to allocate 2.00 GiB. try setting "
            "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True»",
            Message(
                "hip-v2",
                fields={"requested": 2147483648},
                facts={"hint": "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"},
                missing=("total", "free", "allocated", "reserved_unallocated"),
            ),
        ),
        (
            "«XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 "
            "GiB. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is "
            "reserved by PyTorch but unallocated. Please use `empty_cache` to release» all "
            "unoccupied cached memory.",
            Message(
                "xpu-v2",
                fields={
                    "requested": 8589934592,
                    "total": 16224238961,
                    "allocated": 0,
                    "reserved_unallocated": 0,
                },
                facts={"hint": "empty_cache"},
                device="xpu:0",
            ),
        ),
        (
            "«Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB. use "
            "empty_cache to release» all unoccupied cached memory",
            Message(
                "xpu-v2",
                fields={"requested": 8589934592, "total": 16224238961},
                facts={"hint": "empty_cache"},
                device="xpu:0",
                missing=("allocated", "reserved_unallocated"),
            ),
        ),
        (
            "«XPU out of memory. Tried to allocate 8.00 GiB (GPU 0; 15.11 GiB total capacity; "
            "1.00 GiB already allocated; 1.00 GiB reserved in total by PyTorch)»",
            Message(
                "xpu-v1",
                fields={
                    "requested": 8589934592,
                    "total": 16224238961,
                    "allocated": 1073741824,
                    "reserved": 1073741824,
                },
                device="xpu:0",
            ),
        ),
        (
            "NPU out of memory. «Tried to allocate 22.00 MiB (NPU 3; 60.97 GiB total capacity; "
            "10.24 GiB already allocated; 19.52 MiB free; 10.65 GiB reserved in total by "
            "PyTorch)»",
            Message(
                "npu-v1",
                fields={
                    "requested": 23068672,
                    "total": 65466039009,
                    "free": 20468204,
                    "allocated": 10995116278,
                    "reserved": 11435350426,
                },
                device="npu:3",
            ),
        ),
        (
            "MUSA out of memory. «Tried to allocate 2.00 GiB. MUSA 1 has a total capacity of "
            "47.00 GiB of which 1.00 GiB is free. Of the allocated memory 45.00 GiB is allocated "
            "by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.»",
            Message(
                "npu-v2",
                fields={
                    "requested": 2147483648,
                    "total": 50465865728,
                    "free": 1073741824,
                    "allocated": 48318382080,
                    "reserved_unallocated": 104857600,
                },
                device="musa:1",
            ),
        ),
        # Without its beginning
        (
            "«GPU 0 has a total capacity of 15.98 GiB of which 1.40 GiB» is free.",
            Message(
                "cuda-v2",
                fields={"total": 17158394348, "free": 1503238554},
                device="cuda:0",
                missing=("requested", "allocated", "reserved_unallocated"),
            ),
        ),
        (
            "x. «Of the allocated memory 1.26 GiB» is allocated by PyTorch",
            Message(
                "cuda-v2",
                fields={"allocated": 1352914698},
                missing=("requested", "total", "free", "reserved_unallocated"),
            ),
        ),
        (
            "«6.50 GiB already allocated; 10.00 MiB free;» 6.60 GiB reserved in total by PyTorch)»",
            Message(
                "cuda-v1",
                fields={"reserved": 7086696038, "free": 10485760, "allocated": 6979321856},
                missing=("requested", "total"),
            ),
        ),
        # cudaMallocAsync
        (
            "«Allocation on device 0 would exceed allowed memory. (out of memory)\n"
            "Currently allocated     : 9.43 GiB\n"
            "Requested               : 640.00 MiB\n"
            "Device limit            : 11.59 GiB\n"
            "Free (according to CUDA): 7.12 MiB\n"
            "PyTorch limit (set by user-supplied memory fraction)\n"
            "                        : 17179869184.00 GiB»",
            Message(
                "cuda-async",
                fields={
                    "requested": 671088640,
                    "total": 12444667740,
                    "free": 7465861,
                    "allocated": 10125385400,
                    "allowed": None,
                },
                device="cuda:0",
            ),
        ),
        (
            "«Allocation on device 12 would exceed allowed memory». (out of memory)",
            Message("cuda-async", device="cuda:12", missing=("requested", "total", "free", "allocated")),
        ),
        (
            "«Allocation on device would exceed allowed memory. Requested : 640.00 MiB»",
            Message("cuda-async", fields={"requested": 671088640}, missing=("total", "free", "allocated")),
        ),
        (
            "torch.«OutOfMemoryError: Allocation on device»",
            Message("cuda-async", missing=("requested", "total", "free", "allocated")),
        ),
        # Metal
        (
            "RuntimeError: «MPS backend out of memory (MPS allocated: 12.74 GB, other "
            "allocations: 4.39 GB, max allowed: 18.13 GB). Tried to allocate 1.02 GB» on private "
            "pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit",
            Message(
                "mps",
                fields={
                    "allocated": 13679470838,
                    "other": 4713726607,
                    "max_allowed": 19466939269,
                    "requested": 1095216660,
                },
                facts={"hint": "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"},
                device="mps",
            ),
        ),
        (
            "«MPS backend out of memory (MPS allocated: 12.74 GB, other allocations: 4.39 GB). "
            "Tried to allocate 1.02 GB» on shared pool",
            Message(
                "mps",
                fields={"allocated": 13679470838, "other": 4713726607, "requested": 1095216660},
                device="mps",
            ),
        ),
        (
            "«MPS backend out of memory (MPS allocated: 12.74 GB», other allocations: x, max "
            "allowed: x). Tried to allocate x",
            Message(
                "mps",
                fields={"allocated": 13679470838, "other": None, "max_allowed": None, "requested": None},
                device="mps",
                missing=("other", "requested"),
            ),
        ),
        (
            "«MPS backend out of memory»",
            Message("mps", device="mps", missing=("allocated", "other", "requested")),
        ),
        (
            "RuntimeError: «Invalid buffer size: 9.47 GiB»",
            Message("mps", form="buffer", fields={"requested": 10168335073}, device="mps"),
        ),
    ],
)
def test_what_a_message_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message)
    assert found == expected


@pytest.mark.parametrize(
    "text", ["Tried to", "Out of memory. Tried to sleep", "you tried to allocate it all"]
)
def test_words_without_a_figure_are_none(text: str) -> None:
    assert {found.message.family for found in find(text)} <= {"mention"}
