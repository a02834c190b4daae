"""Failed allocations of any runtime: the words by which a line says so, and the figures that it has."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.allocation import first_that_speaks
from memtriage.messages.grammar.lines import read_lines
from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected

LOG = ["step 1", "CUDA error in tensor.pin_memory()", "the swap is full", "peak memory of the step"]


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # What was asked, in the words of each runtime
        (
            "blas: «failed to allocate 3.50 GiB on device 1: out of memory»",
            Message("allocation", form="failed", fields={"requested": 3758096384}),
        ),
        ("«failed to allocate 512 bytes»", Message("allocation", form="failed", fields={"requested": 512})),
        (
            "«failed to allocate buffer of size 4096»",
            Message("allocation", form="failed", fields={"requested": 4096}),
        ),
        (
            "«failed to allocate buffer of size 4096 MiB»",
            Message("allocation", form="failed", fields={"requested": 4294967296}),
        ),
        (
            "«failed to allocate buffer of size 1.5»",
            Message("allocation", form="failed", fields={"requested": 2}),
        ),
        (
            "model «requires more system memory (9.5 GiB) than is available (4.0 GiB)»",
            Message(
                "allocation",
                form="failed",
                fields={"requested": 10200547328, "free": 4294967296},
                device="host",
            ),
        ),
        (
            "«Ran out of memory: requested amount of GPU memory (4096 bytes)»",
            Message("allocation", form="failed", fields={"requested": 4096}),
        ),
        (
            '«unable to reserve: requested="64 MiB"»',
            Message("allocation", form="failed", fields={"requested": 67108864}),
        ),
        (
            "«Cannot allocate: allocation of 9000 failed»",
            Message("allocation", form="failed", fields={"requested": 9000}),
        ),
        (
            "«Attempting to reserve 4.00G. That was not possible. There are 1.00G free.»",
            Message("allocation", form="failed", fields={"requested": 4294967296, "free": 1073741824}),
        ),
        (
            "«Out of memory: the allocating of 2 GiB, and available memory is only 1.00 GiB, "
            'total="8.00 GiB"»',
            Message(
                "allocation",
                form="failed",
                fields={"requested": 2147483648, "free": 1073741824, "total": 8589934592},
            ),
        ),
        # What was used, or a limit
        (
            "«Ran out of memory in memory space hbm. Used 9.50G of 7.98G hbm.»",
            Message(
                "allocation", form="failed", fields={"used": 10200547328, "total": 8568459756}, device="tpu"
            ),
        ),
        (
            "«Out of memory allocating 8,000 bytes (allocated so far: 5 bytes, limit set to: 4,000 bytes).»",
            Message("allocation", form="failed", fields={"allowed": 4000, "requested": 8000, "allocated": 5}),
        ),
        (
            "«Out of memory allocating 1 KiB (total 3 MiB).»",
            Message("allocation", form="failed", fields={"requested": 1024, "allocated": 3145728}),
        ),
        (
            "«Out of memory allocating 1 KiB: 2.00 MiB memory has been allocated, 7 KiB free»",
            Message(
                "allocation", form="failed", fields={"requested": 1024, "allocated": 2097152, "free": 7168}
            ),
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
        (
            "buffer maximum 9 MB:\n\n«failed to allocate buffer of size 4096»",
            Message("allocation", form="failed", fields={"requested": 4096}),
        ),
        # A shape instead of a size
        (
            "«OOM when allocating tensor with shape[8,4096] and type float on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 131072}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type float32 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 131072}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type int32 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 131072}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type uint32 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 131072}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type half on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 65536}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type float16 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 65536}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type bfloat16 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 65536}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type int16 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 65536}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type double on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 262144}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type float64 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 262144}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type int64 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 262144}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type complex64 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 262144}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type complex128 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 524288}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type bool on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 32768}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type int8 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 32768}),
        ),
        (
            "«OOM when allocating tensor with shape[8,4096] and type uint8 on device:GPU:0»",
            Message("allocation", form="failed", facts={"shape_bytes": 32768}),
        ),
        # Whose memory
        (
            "«Failed to allocate CPU buffer of size 17179869184»",
            Message("allocation", form="failed", fields={"requested": 17179869184}, device="host"),
        ),
        (
            "«failed to allocate 8 MiB of RAM»",
            Message("allocation", form="failed", fields={"requested": 8388608}, device="host"),
        ),
        (
            "«failed to allocate 8 MiB of RAM for the GPU»",
            Message("allocation", form="failed", fields={"requested": 8388608}),
        ),
        (
            "«failed to allocate 8 MiB cuda_host buffer»",
            Message("allocation", form="failed", fields={"requested": 8388608}, device="host"),
        ),
        (
            "TPU: «failed to allocate 8 MiB»",
            Message("allocation", form="failed", fields={"requested": 8388608}, device="tpu"),
        ),
        (
            "«failed to allocate 8 MiB: Metal»",
            Message("allocation", form="failed", fields={"requested": 8388608}, device="mps"),
        ),
        # The program goes on
        (
            "«failed to allocate 512 MiB, retrying with a smaller workspace»",
            Message("allocation", form="survived", fields={"requested": 536870912}, ran_out=False),
        ),
        (
            "«failed to allocate 512 MiB»\nno buffers\nreserving failed, retrying without overlap",
            Message("allocation", form="survived", fields={"requested": 536870912}, ran_out=False),
        ),
        (
            "«failed to allocate 512 MiB»\none\ntwo\nretrying",
            Message("allocation", form="survived", fields={"requested": 536870912}, ran_out=False),
        ),
        (
            "«failed to allocate 512 MiB»\none\ntwo\nthree\nretrying",
            Message("allocation", form="failed", fields={"requested": 536870912}),
        ),
        (
            f"«failed to allocate 512 MiB»\n{'x' * 985}\nfalling back",
            Message("allocation", form="survived", fields={"requested": 536870912}, ran_out=False),
        ),
        (
            f"«failed to allocate 512 MiB»\n{'x' * 987}\nfalling back",
            Message("allocation", form="failed", fields={"requested": 536870912}),
        ),
        # Memory of the chip itself
        (
            "«Ran out of memory in memory space vmem. Used 17.00M of 16.00M vmem.»",
            Message("not-memory", form="on-chip shared memory", ran_out=False),
        ),
        # In no known form
        ("gizmo: «out of memory»", Message("mention", ran_out=False)),
        ("gizmo: «out of memory»\nnext", Message("mention", ran_out=False)),
        ("thread 3: device «memory exhausted»", Message("mention", ran_out=False)),
        ("«显存不足»", Message("mention", ran_out=False)),
        (
            "«failed to allocate a tensor with shape[8,4096] and type gizmo»",
            Message("mention", ran_out=False),
        ),
        ("«failed to allocate: limit set to: 4,000 bytes»", Message("mention", ran_out=False)),
    ],
)
def test_what_a_line_says(marked: str, message: Message) -> None:
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
    assert first_that_speaks(read_lines(lines)) == first
