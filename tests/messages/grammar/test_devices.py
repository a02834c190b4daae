"""Failures of the device without sizes: runtimes, drivers, asserts of the allocator, libraries."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # TensorRT
        ("[TRT] «Error Code 2: OutOfMemory» (no further information)", Message("tensorrt")),
        ("«Error Code 1: Cuda Runtime (out of memory)»", Message("tensorrt")),
        ("«Cuda Error in allocate: 2 (out of memory)»", Message("tensorrt")),
        (
            "«Error Code 2: OutOfMemory (Requested size was 4096 bytes»)",
            Message("tensorrt", fields={"requested": 4096}),
        ),
        (
            "«Error Code 2: OutOfMemory (Requested amount of GPU memory (4096 bytes»)",
            Message("tensorrt", fields={"requested": 4096}),
        ),
        (
            "«Error Code 2: OutOfMemory» (no further information)\n"
            "Skipping tactic 4 due to insufficient memory",
            Message("tensorrt", form="tactic", ran_out=False),
        ),
        (
            f"«Error Code 2: OutOfMemory»{'x' * 1464}Skipping tactic",
            Message("tensorrt", form="tactic", ran_out=False),
        ),
        (f"«Error Code 2: OutOfMemory»{'x' * 1467}Skipping tactic", Message("tensorrt")),
        # Asserts of the allocator
        (
            "«NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
            '"../c10/cuda/CUDACachingAllocator.cpp":830», please',
            Message("nvml-assert"),
        ),
        ("«NVML_SUCCESS == r INTERNAL ASSERT FAILED» here", Message("nvml-assert")),
        (
            "«!block->expandable_segment_ INTERNAL ASSERT FAILED at "
            '"../c10/cuda/CUDACachingAllocator.cpp":9»',
            Message("alloc-assert", ran_out=False),
        ),
        (
            'RuntimeError: false «INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1601»',
            Message("alloc-assert", form="other", ran_out=False),
        ),
        # NCCL
        (
            "«host7:3018451:3018451 [3] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'»",
            Message("nccl", facts={"rank": 3}),
        ),
        ("«Cuda failure 2 'out of memory'»", Message("nccl")),
        (
            "«h:1:2 [0] NCCL WARN Failed to CUDA calloc async 608 bytes»",
            Message("nccl", fields={"requested": 608}, facts={"rank": 0}),
        ),
        ("«Failed to CUDA malloc 4096 bytes»", Message("nccl", fields={"requested": 4096})),
        (
            "«Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 "
            "'out of memory'»",
            Message("nccl", form="multicast", fields={"requested": 2097152}),
        ),
        (
            "«NVLS Multicast memory of size 2097152»",
            Message("nccl", form="multicast", fields={"requested": 2097152}),
        ),
        # The runtime and the driver
        (
            "«cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58»",
            Message("cuda-runtime", form="thc"),
        ),
        (
            "«THCudaCheck FAIL file=/pytorch/aten/src/THC/generic/THCStorage.cu line=58 error=2 "
            ": out of memory»",
            Message("cuda-runtime", form="thc"),
        ),
        (
            "«CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp»:62",
            Message("cuda-driver", form="engine pool"),
        ),
        ("«CUDA driver error: out of memory»", Message("cuda-driver")),
        ("«HIP driver error: out of memory»", Message("cuda-driver")),
        ("«CUDA driver error: invalid argument»", Message("cuda-driver", form="hidden", ran_out=False)),
        ("«CUDA driver error: device not ready»", Message("cuda-driver", form="hidden", ran_out=False)),
        ("RuntimeError: «CUDA error: out of memory»\nCompile with", Message("cuda-runtime")),
        ("«HIP error: out of memory»", Message("cuda-runtime")),
        ("«Triton Error [CUDA]: out of memory»", Message("cuda-runtime")),
        ("failed: «cudaErrorMemoryAllocation»", Message("cuda-runtime")),
        ("«CUDA_ERROR_OUT_OF_MEMORY»: out of memory", Message("cuda-runtime")),
        ("«UR_RESULT_ERROR_OUT_OF_RESOURCES»", Message("xpu-runtime")),
        ("«UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY»", Message("xpu-runtime")),
        # Libraries
        ("«cuDNN error: CUDNN_STATUS_ALLOC_FAILED»", Message("cudnn")),
        ("«CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED»", Message("cudnn")),
        (
            "«cuDNN error: CUDNN_STATUS_NOT_INITIALIZED»",
            Message("cudnn", form="not initialized", ran_out=False),
        ),
        (
            "RuntimeError: «CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`»",
            Message("cublas"),
        ),
        (
            "«CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`»",
            Message("cublas", form="not initialized", ran_out=False),
        ),
        ("«HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`»", Message("cublas")),
        ("«CUSOLVER_STATUS_ALLOC_FAILED»", Message("cublas")),
        # Other errors
        (
            "CUDA error: an «illegal memory access was encountered»",
            Message("not-memory", form="illegal access", ran_out=False),
        ),
        ("«Memory access fault by GPU node»-1", Message("not-memory", form="illegal access", ran_out=False)),
        (
            "«out of resource: shared memory», Required: 262144, Hardware limit: 101376",
            Message("not-memory", form="on-chip shared memory", ran_out=False),
        ),
        (
            "OutOfMemoryError: «out of resource: triton_mm Required: 9» Hardware limit:8",
            Message("not-memory", form="on-chip shared memory", ran_out=False),
        ),
        (
            "«CUDA error: device-side assert triggered»",
            Message("not-memory", form="device error", ran_out=False),
        ),
        (
            "«Triton Error [CUDA]: misaligned address»",
            Message("not-memory", form="device error", ran_out=False),
        ),
        ("«HIP error: invalid device function»", Message("not-memory", form="device error", ran_out=False)),
        (
            "cu:11: «block: [0,0,0], thread: [1,0,0] Assertion» `i < n` failed",
            Message("not-memory", form="device error", ran_out=False),
        ),
        (
            "ImportError: libgomp.so.1: «cannot allocate memory in static TLS block»",
            Message("not-memory", form="static TLS", ran_out=False),
        ),
    ],
)
def test_what_a_message_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message)
    assert found == expected
