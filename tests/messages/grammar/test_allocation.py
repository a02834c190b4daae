"""Failed allocations of any runtime: the words by which a line says so, and the figures that it has."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.allocation import first_that_speaks
from memtriage.messages.grammar.lines import read_lines
from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected
from support.message_cases import failed

LOG = ["step 1", "CUDA error in tensor.pin_memory()", "the swap is full", "peak memory of the step"]


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # What was asked, in the words of each runtime
        ("blas: «failed to allocate 3.50 GiB on device 1: out of memory»", failed(requested=3758096384)),
        ("«failed to allocate 512 bytes»", failed(requested=512)),
        ("«failed to allocate buffer of size 4096»", failed(requested=4096)),
        ("«failed to allocate buffer of size 4096 MiB»", failed(requested=4294967296)),
        ("«failed to allocate buffer of size 1.5»", failed(requested=2)),
        (
            "model «requires more system memory (9.5 GiB) than is available (4.0 GiB)»",
            failed(device="host", requested=10200547328, free=4294967296),
        ),
        ("«Ran out of memory: requested amount of GPU memory (4096 bytes)»", failed(requested=4096)),
        ('«unable to reserve: requested="64 MiB"»', failed(requested=67108864)),
        ("«Cannot allocate: allocation of 9000 failed»", failed(requested=9000)),
        (
            "«Out of memory: the allocating of 2 GiB, and available memory is only 1.00 GiB, "
            'total="8.00 GiB"»',
            failed(requested=2147483648, free=1073741824, total=8589934592),
        ),
        # What was used, or a limit
        (
            "«Ran out of memory in memory space hbm. Used 9.50G of 7.98G hbm.»",
            failed(device="tpu", used=10200547328, total=8568459756),
        ),
        ("«Out of memory allocating 1 KiB (total 3 MiB).»", failed(requested=1024, allocated=3145728)),
        (
            "«Out of memory allocating 1 KiB: 2.00 MiB memory has been allocated, 7 KiB free»",
            failed(requested=1024, allocated=2097152, free=7168),
        ),
        (
            "«attempting to allocate 9000000000 bytes, greater than the maximum allowed buffer "
            "size of 8000000000»",
            Message("allocation", form="single", fields={"max_buffer": 8000000000, "requested": 9000000000}),
        ),
        (
            "«Exceeded max size of one allocation: requested 9000 MB, but max size is 8000 MB»",
            Message("allocation", form="single", fields={"max_buffer": 8388608000, "requested": 9437184000}),
        ),
        (
            "buffer maximum 9 MB:\n«failed to allocate buffer of size 4096»",
            Message("allocation", form="single", fields={"requested": 4096}),
        ),
        ("buffer maximum 9 MB:\n\n«failed to allocate buffer of size 4096»", failed(requested=4096)),
        # Whose memory
        ("«failed to allocate 8 MiB of RAM»", failed(device="host", requested=8388608)),
        ("«failed to allocate 8 MiB of RAM for the GPU»", failed(requested=8388608)),
        ("«failed to allocate 8 MiB cuda_host buffer»", failed(device="host", requested=8388608)),
        ("TPU: «failed to allocate 8 MiB»", failed(device="tpu", requested=8388608)),
        ("«failed to allocate 8 MiB: Metal»", failed(device="mps", requested=8388608)),
        # The program goes on
        (
            "«failed to allocate 512 MiB, retrying with a smaller workspace»",
            Message("allocation", form="survived", fields={"requested": 536870912}),
        ),
        (
            "«failed to allocate 512 MiB»\nno buffers\nreserving failed, retrying without overlap",
            Message("allocation", form="survived", fields={"requested": 536870912}),
        ),
        ("«failed to allocate 512 MiB»\none\ntwo\nthree\nretrying", failed(requested=536870912)),
        # Memory of the chip itself
        (
            "«Ran out of memory in memory space vmem. Used 17.00M of 16.00M vmem.»",
            Message("not-memory", form="on-chip shared memory"),
        ),
        # In no known form
        ("gizmo: «out of memory»", Message("mention")),
        ("gizmo: «out of memory»\nnext", Message("mention")),
        ("thread 3: device «memory exhausted»", Message("mention")),
        ("«显存不足»", Message("mention")),
        (
            "«failed to allocate a tensor with shape[8,4096] and type gizmo»",
            Message("mention"),
        ),
        ("«failed to allocate: limit set to: 4,000 bytes»", Message("mention")),
    ],
)
def test_what_a_line_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message, tight=False)
    assert found == expected


@pytest.mark.parametrize(
    ("types", "itemsize"),
    [
        ("complex128", 16),
        ("double float64 int64 complex64", 8),
        ("float float32 int32 uint32", 4),
        ("half float16 bfloat16 int16", 2),
        ("bool int8 uint8", 1),
    ],
)
def test_a_shape_and_a_type_are_a_size(types: str, itemsize: int) -> None:
    for name in types.split():
        marked = f"«OOM when allocating tensor with shape[8,4096] and type {name} on device:GPU:0»"
        message = Message("allocation", form="failed", facts={"shape_bytes": 32768 * itemsize})
        found, expected = found_and_expected(marked, message, tight=False)
        assert found == expected


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (LOG, (3, "the swap is full")),
        (LOG[:2], (2, "CUDA error in tensor.pin_memory()")),
        (LOG[:1], None),
        ([], None),
        (["  Memory: 3 GiB  "], (1, "Memory: 3 GiB")),
    ],
)
def test_the_first_line_that_speaks_of_memory(lines: list[str], first: tuple[int, str] | None) -> None:
    assert first_that_speaks([*read_lines("\n".join(lines))]) == first
