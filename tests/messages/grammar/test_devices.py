"""Failures of the device without sizes, messages of inference engines, and what others say of a death."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "said"),
    [
        # TensorRT
        ("[TRT] «Error Code 2: OutOfMemory» (no further information)", "tensorrt"),
        ("«Error Code 1: Cuda Runtime (out of memory)»", "tensorrt"),
        ("«Cuda Error in allocate: 2 (out of memory)»", "tensorrt"),
        ("«Error Code 2: OutOfMemory (Requested size was 4096 bytes»)", "tensorrt requested=4096"),
        (
            "«Error Code 2: OutOfMemory (Requested amount of GPU memory (4096 bytes»)",
            "tensorrt requested=4096",
        ),
        # Asserts of the allocator
        ("«NVML_SUCCESS == r INTERNAL ASSERT FAILED» here", "nvml-assert"),
        (
            'RuntimeError: false «INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1601»',
            "alloc-assert/other",
        ),
        # NCCL
        ("«Cuda failure 2 'out of memory'»", "nccl"),
        ("«h:1:2 [0] NCCL WARN Failed to CUDA calloc async 608 bytes»", "nccl requested=608 rank:0"),
        ("«Failed to CUDA malloc 4096 bytes»", "nccl requested=4096"),
        ("«NVLS Multicast memory of size 2097152»", "nccl/multicast requested=2097152"),
        # The runtime and the driver
        (
            "«cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58»",
            "cuda-runtime/thc",
        ),
        (
            "«THCudaCheck FAIL file=/pytorch/aten/src/THC/generic/THCStorage.cu line=58 error=2 : out of "
            "memory»",
            "cuda-runtime/thc",
        ),
        ("«CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp»:62", "cuda-driver/engine_pool"),
        ("«CUDA driver error: out of memory»", "cuda-driver"),
        ("«HIP driver error: out of memory»", "cuda-driver"),
        ("«CUDA driver error: invalid argument»", "cuda-driver/hidden"),
        ("«CUDA driver error: device not ready»", "cuda-driver/hidden"),
        ("RuntimeError: «CUDA error: out of memory»\nCompile with", "cuda-runtime"),
        ("«HIP error: out of memory»", "cuda-runtime"),
        ("«Triton Error [CUDA]: out of memory»", "cuda-runtime"),
        ("failed: «cudaErrorMemoryAllocation»", "cuda-runtime"),
        ("«CUDA_ERROR_OUT_OF_MEMORY»: out of memory", "cuda-runtime"),
        ("«UR_RESULT_ERROR_OUT_OF_RESOURCES»", "xpu-runtime"),
        ("«UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY»", "xpu-runtime"),
        # Libraries
        ("«cuDNN error: CUDNN_STATUS_ALLOC_FAILED»", "cudnn"),
        ("«CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED»", "cudnn"),
        ("«cuDNN error: CUDNN_STATUS_NOT_INITIALIZED»", "cudnn/not_initialized"),
        (
            "«CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`»",
            "cublas/not_initialized",
        ),
        ("«HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`»", "cublas"),
        ("«CUSOLVER_STATUS_ALLOC_FAILED»", "cublas"),
        # Other errors
        ("CUDA error: an «illegal memory access was encountered»", "not-memory/illegal_access"),
        ("«Memory access fault by GPU node»-1", "not-memory/illegal_access"),
        (
            "«out of resource: shared memory», Required: 262144, Hardware limit: 101376",
            "not-memory/on-chip_shared_memory",
        ),
        (
            "OutOfMemoryError: «out of resource: triton_mm Required: 9» Hardware limit:8",
            "not-memory/on-chip_shared_memory",
        ),
        ("«CUDA error: device-side assert triggered»", "not-memory/device_error"),
        ("«Triton Error [CUDA]: misaligned address»", "not-memory/device_error"),
        ("«HIP error: invalid device function»", "not-memory/device_error"),
        ("cu:11: «block: [0,0,0], thread: [1,0,0] Assertion» `i < n` failed", "not-memory/device_error"),
        ("ImportError: libgomp.so.1: «cannot allocate memory in static TLS block»", "not-memory/static_TLS"),
        # vLLM
        (
            "«Free memory on device cuda:1 (10.51/79.11 GiB) on startup is less than desired GPU memory "
            "utilization (0.95, 71.2 GiB)».",
            "vllm/startup free=11285026570 total=84943715697 desired=76450417869",
        ),
        (
            "To serve at least one request with the models's max seq len (131072), («16.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (9.50 GiB)».",
            "vllm/length kv_needed=17179869184 kv_available=10200547328",
        ),
        (
            "The model's «max seq len (131072) is larger than the maximum number of tokens that can be "
            "stored in KV cache (65536)».",
            "vllm/length max_seq_len:131072 kv_tokens:65536",
        ),
        # Other engines
        ("«Not enough memory to handle 4096 prefill tokens».", "engine/batch"),
        ("«Decode out of memory.» Try to lower your batch size.", "engine/pool"),
        ("«no space left for only one request»", "engine/pool"),
        ("RMM failure: «Maximum pool size exceeded»", "engine/pool"),
        ("Sequence group 3 is «preempted by PreemptionMode».SWAP mode", "engine/preempted"),
        ("«KV cache pool is full. Retract requests».", "engine/preempted"),
        ("«failed to find free space in the KV cache, retrying» with smaller batch", "engine/preempted"),
        ("«Free memory on device (78.51/79.11 GiB) on startup.»", "engine/report"),
        # DeepSpeed
        (
            "After initializing optimizer states\n«MA 1 GB Max_MA 1 GB CA 1 GB Max_CA 1 GB»",
            "deepspeed-mem MA=1073741824 Max_MA=1073741824 CA=1073741824 Max_CA=1073741824",
        ),
    ],
)
def test_what_a_message_says(marked: str, said: str) -> None:
    found, expected = found_and_expected(marked, said)
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
