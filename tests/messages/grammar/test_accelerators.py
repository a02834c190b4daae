"""Messages of the device allocators: each figure, whatever is missing, and whose message it is."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.find import find
from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "said"),
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
            "cuda-v2 requested=2147483648 this_process=? -total -free -allocated -reserved_unallocated",
        ),
        (
            "«CUDA out of memory». GPU 1 has",
            "cuda-v2 @cuda:1 -requested -total -free -allocated -reserved_unallocated",
        ),
        (
            "«CUDA out of memory. Tried to» allocate x GPU has a total capacity of x of which x Of the "
            "allocated memory x this process has x",
            "cuda-v2 requested=? total=? free=? allocated=? this_process=? -requested -total -free "
            "-allocated -reserved_unallocated",
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
            "cuda-v2 -requested -total -free -allocated -reserved_unallocated",
        ),
        # CUDA, 1.x and 0.x
        (
            "«CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; 10.00 MiB "
            "free; 6.60 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try "
            "setting max_split_size_mb» to",
            "cuda-v1 @cuda:0 requested=20971520 total=8514772664 free=10485760 reserved=7086696038 "
            "hint:max_split_size_mb -allocated",
        ),
        # Other devices
        (
            "Error: «Tried to allocate 2.00 GiB. try setting "
            "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True»",
            "hip-v2 requested=2147483648 hint:PYTORCH_HIP_ALLOC_CONF=expandable_segments:True -total -free "
            "-allocated -reserved_unallocated",
        ),
        (
            "«Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB. use empty_cache to "
            "release» all unoccupied cached memory",
            "xpu-v2 @xpu:0 requested=8589934592 total=16224238961 hint:empty_cache -allocated "
            "-reserved_unallocated",
        ),
        # Without its beginning
        (
            "«GPU 0 has a total capacity of 15.98 GiB of which 1.40 GiB» is free.",
            "cuda-v2 @cuda:0 total=17158394348 free=1503238554 -requested -allocated -reserved_unallocated",
        ),
        (
            "x. «Of the allocated memory 1.26 GiB» is allocated by PyTorch",
            "cuda-v2 allocated=1352914698 -requested -total -free -reserved_unallocated",
        ),
        (
            "«6.50 GiB already allocated; 10.00 MiB free;» 6.60 GiB reserved in total by PyTorch)»",
            "cuda-v1 reserved=7086696038 free=10485760 allocated=6979321856 -requested -total",
        ),
        # cudaMallocAsync
        (
            "«Allocation on device 12 would exceed allowed memory». (out of memory)",
            "cuda-async @cuda:12 -requested -total -free -allocated",
        ),
        (
            "«Allocation on device would exceed allowed memory. Requested : 640.00 MiB»",
            "cuda-async requested=671088640 -total -free -allocated",
        ),
        ("torch.«OutOfMemoryError: Allocation on device»", "cuda-async -requested -total -free -allocated"),
        # Metal
        (
            "«MPS backend out of memory (MPS allocated: 12.74 GB», other allocations: x, max allowed: x). "
            "Tried to allocate x",
            "mps @mps allocated=13679470838 other=? max_allowed=? requested=? -other -requested",
        ),
        ("«MPS backend out of memory»", "mps @mps -allocated -other -requested"),
        ("RuntimeError: «Invalid buffer size: 9.47 GiB»", "mps/buffer @mps requested=10168335073"),
    ],
)
def test_what_a_message_says(marked: str, said: str | Message) -> None:
    found, expected = found_and_expected(marked, said)
    assert found == expected


@pytest.mark.parametrize(
    "text", ["Tried to", "Out of memory. Tried to sleep", "you tried to allocate it all"]
)
def test_words_without_a_figure_are_none(text: str) -> None:
    assert {found.message.family for found in find(text)} <= {"mention"}
