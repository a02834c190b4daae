"""Failures of the device without sizes, messages of inference engines, and what others say of a death."""

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
        # Asserts of the allocator
        ("«NVML_SUCCESS == r INTERNAL ASSERT FAILED» here", Message("nvml-assert")),
        (
            'RuntimeError: false «INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1601»',
            Message("alloc-assert", form="other"),
        ),
        # NCCL
        ("«Cuda failure 2 'out of memory'»", Message("nccl")),
        (
            "«h:1:2 [0] NCCL WARN Failed to CUDA calloc async 608 bytes»",
            Message("nccl", fields={"requested": 608}, facts={"rank": 0}),
        ),
        ("«Failed to CUDA malloc 4096 bytes»", Message("nccl", fields={"requested": 4096})),
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
        ("«CUDA driver error: invalid argument»", Message("cuda-driver", form="hidden")),
        ("«CUDA driver error: device not ready»", Message("cuda-driver", form="hidden")),
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
            Message("cudnn", form="not initialized"),
        ),
        (
            "«CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`»",
            Message("cublas", form="not initialized"),
        ),
        ("«HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`»", Message("cublas")),
        ("«CUSOLVER_STATUS_ALLOC_FAILED»", Message("cublas")),
        # Other errors
        (
            "CUDA error: an «illegal memory access was encountered»",
            Message("not-memory", form="illegal access"),
        ),
        ("«Memory access fault by GPU node»-1", Message("not-memory", form="illegal access")),
        (
            "«out of resource: shared memory», Required: 262144, Hardware limit: 101376",
            Message("not-memory", form="on-chip shared memory"),
        ),
        (
            "OutOfMemoryError: «out of resource: triton_mm Required: 9» Hardware limit:8",
            Message("not-memory", form="on-chip shared memory"),
        ),
        (
            "«CUDA error: device-side assert triggered»",
            Message("not-memory", form="device error"),
        ),
        (
            "«Triton Error [CUDA]: misaligned address»",
            Message("not-memory", form="device error"),
        ),
        ("«HIP error: invalid device function»", Message("not-memory", form="device error")),
        (
            "cu:11: «block: [0,0,0], thread: [1,0,0] Assertion» `i < n` failed",
            Message("not-memory", form="device error"),
        ),
        (
            "ImportError: libgomp.so.1: «cannot allocate memory in static TLS block»",
            Message("not-memory", form="static TLS"),
        ),
        # vLLM
        (
            "«Free memory on device cuda:1 (10.51/79.11 GiB) on startup is less than desired GPU "
            "memory utilization (0.95, 71.2 GiB)».",
            Message(
                "vllm",
                form="startup",
                fields={"free": 11285026570, "total": 84943715697, "desired": 76450417869},
            ),
        ),
        (
            "To serve at least one request with the models's max seq len (131072), («16.00 GiB "
            "KV cache is needed, which is larger than the available KV cache memory (9.50 GiB)».",
            Message("vllm", form="length", fields={"kv_needed": 17179869184, "kv_available": 10200547328}),
        ),
        (
            "The model's «max seq len (131072) is larger than the maximum number of tokens that "
            "can be stored in KV cache (65536)».",
            Message("vllm", form="length", facts={"max_seq_len": 131072, "kv_tokens": 65536}),
        ),
        # Other engines
        ("«Not enough memory to handle 4096 prefill tokens».", Message("engine", form="batch")),
        ("«Decode out of memory.» Try to lower your batch size.", Message("engine", form="pool")),
        ("«no space left for only one request»", Message("engine", form="pool")),
        ("RMM failure: «Maximum pool size exceeded»", Message("engine", form="pool")),
        (
            "Sequence group 3 is «preempted by PreemptionMode».SWAP mode",
            Message("engine", form="preempted"),
        ),
        ("«KV cache pool is full. Retract requests».", Message("engine", form="preempted")),
        (
            "«failed to find free space in the KV cache, retrying» with smaller batch",
            Message("engine", form="preempted"),
        ),
        (
            "«Free memory on device (78.51/79.11 GiB) on startup.»",
            Message("engine", form="report"),
        ),
        # DeepSpeed
        (
            "After initializing optimizer states\n«MA 1 GB Max_MA 1 GB CA 1 GB Max_CA 1 GB»",
            Message("deepspeed-mem", fields=dict.fromkeys(("MA", "Max_MA", "CA", "Max_CA"), 2**30)),
        ),
    ],
)
def test_what_a_message_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message)
    assert found == expected


@pytest.mark.parametrize(
    ("marked", "form"),
    [
        (
            "[Rank 0] «Watchdog caught collective operation timeout»: WorkNCCL(SeqNum=3)",
            "collective timed out",
        ),
        ("«Timed out waiting 1800000ms for recv» operation to complete", "collective timed out"),
        ("«watchdog thread terminated with exception»", "watchdog ended the process"),
        ("we are going «to take down the entire process».", "watchdog ended the process"),
        ("NCCL: «remote process exited» or there was a network error", "peer lost"),
        ("«Connection closed by remote peer»", "peer lost"),
        ("«ncclRemoteError»", "peer lost"),
        ("W0101 «Sending process 123 closing signal SIGTERM»", "ended by the launcher"),
        ("«srun: Job step aborted»: Waiting up to 32 seconds", "ended by the launcher"),
        ("torch.distributed.elastic.multiprocessing.errors.«ChildFailedError»", "launcher's report"),
        ("«failed (exitcode: 1)» local_rank: 5", "launcher's report"),
    ],
)
def test_what_others_say_when_one_has_died(marked: str, form: str) -> None:
    found, expected = found_and_expected(marked, Message("aftermath", form=form))
    assert found == expected
