"""Whether an error means that memory ran out, and the figures of its message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.errors import is_out_of_memory, read_message
from memtriage.messages.grammar.message import OomFields
from support.message_texts import ERRORS

RUNTIME = ("RuntimeError", "Exception", "BaseException", "object")


@pytest.mark.parametrize(
    "text",
    [
        *ERRORS.values(),
        "CUDA driver error: out of memory",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please',
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error in: ProcessGroupNCCL.cpp:2021, unhandled cuda error\nCuda failure 2 'out of memory'",
        "std::bad_alloc",
        "[Errno 12] Cannot allocate memory",
        "unable to mmap 1048576 bytes from file </torch_1_2_3>: Cannot allocate memory (12)",
        "Unexpected bus error encountered in worker. Possibly insufficient shared memory (shm).",
        "unable to write to file </torch_739_144252761_4>: No space left on device (28)",
    ],
)
def test_texts_of_a_failed_allocation(text: str) -> None:
    assert is_out_of_memory(RUNTIME, text)


@pytest.mark.parametrize(
    "names",
    [
        ("OutOfMemoryError", *RUNTIME),
        ("torch.OutOfMemoryError", *RUNTIME),
        ("torch.cuda.OutOfMemoryError",),
        ("MemoryError", "Exception"),
        ("numpy._core._exceptions._ArrayMemoryError", "MemoryError", "Exception"),
        ("OutOfTokens", "MemoryError", "ValueError"),
    ],
)
def test_classes_that_mean_it_whatever_they_say(names: tuple[str, ...]) -> None:
    assert is_out_of_memory(names, "")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("ValueError", "Exception"), "this would run out of memory: CUDA out of memory expected"),
        (("KeyError", "LookupError", "Exception"), "std::bad_alloc"),
        (("ImportError", "Exception"), "libgomp.so.1: cannot allocate memory in static TLS block"),
        (RUNTIME, "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
        (RUNTIME, "memory format option is only supported by strided tensors"),
        (RUNTIME, "DataLoader worker (pid 19597) is killed by signal: Killed."),
        (
            RUNTIME,
            "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
        ),
        (
            RUNTIME,
            '!block->expandable_segment_ INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":9',
        ),
        (RUNTIME, "CUDA error: an illegal memory access was encountered"),
        (
            ("OutOfResources", "Exception"),
            "out of resource: shared memory, Required: 262144, Hardware limit: 101376",
        ),
        (("OSError", "Exception"), "[Errno 28] No space left on device: 'checkpoint.pt'"),
    ],
)
def test_what_only_mentions_memory_is_not_it(names: tuple[str, ...], text: str) -> None:
    assert not is_out_of_memory(names, text)


# What the message says


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        pytest.param(
            ERRORS["full"],
            OomFields(
                device="cuda:0",
                requested=2104533975,
                total=85018877624,
                free=1159641170,
                allocated=80863496765,
                reserved_unallocated=1964947538,
            ),
            id="full",
        ),
        pytest.param(
            ERRORS["mps"],
            OomFields(device="mps", requested=1095216660, allocated=13679470838, allowed=19466939269),
            id="mps",
        ),
        pytest.param("MemoryError", OomFields(device="host"), id="MemoryError"),
        pytest.param(ERRORS["bare"], OomFields(), id="bare"),
        pytest.param("", OomFields(), id="nothing"),
    ],
)
def test_the_figures_of_a_message(text: str, fields: OomFields) -> None:
    assert read_message(text) == fields


@settings(deadline=None)
@given(st.integers(0, len(ERRORS["graphs"])))
def test_a_cut_message_gives_the_same_figures_or_none(end: int) -> None:
    whole, cut = read_message(ERRORS["graphs"]), read_message(ERRORS["graphs"][:end])
    for name in whole.__slots__:
        assert getattr(cut, name) in (None, getattr(whole, name))


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert read_message(text).requested is None or "ocate" in text
