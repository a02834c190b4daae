"""Failures of the device without sizes: the runtime, the driver, asserts of the allocator, and libraries."""

from __future__ import annotations

import re
from typing import Final

from memtriage.messages.grammar.message import Grammar, Message, plain
from memtriage.messages.grammar.sizes import exact_bytes
from memtriage.model.explanation import Field


def _read_assert(start: re.Match[str], text: str) -> Message:
    if start[0].startswith("NVML_SUCCESS"):
        return Message("nvml-assert")
    return Message("alloc-assert", "" if "expandable_segment_" in start[0] else "other", ran_out=False)


_ASSERT: Final = re.compile(
    r"(?:NVML_SUCCESS==[^\"]{1,200}?|!block->expandable_segment_)INTERNALASSERTFAILED"
    r'(?:at"?[^"]{0,300}?CachingAllocator\.cpp"?:\d{1,6})?|'
    r'INTERNALASSERTFAILEDat"?[^"]{0,300}?CachingAllocator\.cpp"?:\d{1,6}'
)

_NCCL: Final = re.compile(
    r"(?:[\w.-]{1,64}:\d+:\d+\[(?P<rank>\d+)\][^|]{0,80}?)?"
    r"(?:Cudafailure(?:\d+)?'outofmemory'|"
    r"FailedtoCUDA(?:[mc]alloc)(?:async)?(?P<asked>\d{1,20})bytes|"
    r"(?:FailedtobindNVLinkSHARP\(NVLS\)|NVLS)Multicastmemoryofsize(?P<bound>\d{1,20})"
    r"(?::CUDAerror2'outofmemory')?)"
)


def _read_nccl(start: re.Match[str], text: str) -> Message:
    size = start["asked"] or start["bound"]
    fields: dict[str, Field] = {"requested": exact_bytes(size)} if size else {}
    facts: dict[str, str | int] = {} if start["rank"] is None else {"rank": int(start["rank"])}
    return Message("nccl", "multicast" if start["bound"] else "", fields, facts)


_OTHER_ERRORS: Final = (
    r"(?:(?:CUDA|HIP)(?:runtime|kernel|driver)?error|TritonError\[(?:CUDA|HIP)\]):(?:device-sideasserttriggered|"
    r"misalignedaddress|unspecifiedlaunch(?:failure)?|anillegalinstruction|invaliddeviceordinal|"
    r"nokernelimageisavailable|thelaunchtimedout|uncorrectableECCerror|invalidconfigurationargument|"
    r"invaliddevicefunction|invalidpc|hardwarestackerror)|"
    r"block:\[\d+,\d+,\d+\],thread:\[\d+,\d+,\d+\]Assertion"
)
"""The runtime's errors that are none of memory running out."""

_TENSORRT: Final = re.compile(
    r"CudaErrorin[\w:]{1,60}:2\(outofmemory\)|"
    r"ErrorCode\d{1,2}:(?:CudaRuntime\(outofmemory\)|OutOfMemory)"
)
_TENSORRT_ASKED: Final = re.compile(r"(?:Requestedsizewas|RequestedamountofGPUmemory\()(\d{1,20})bytes")
_TACTIC: Final = 1500
"""Characters after a failure of TensorRT's builder within which it says that it skips the tactic."""


def _read_tensorrt(start: re.Match[str], text: str) -> Message:
    # The builder tries what does not fit, too, and goes on without it.
    asked = _TENSORRT_ASKED.search(text, 0, _TACTIC)
    skipped = "kippingtactic" in start.string[start.start() : start.start() + _TACTIC]
    return Message(
        "tensorrt",
        form="tactic" if skipped else "",
        fields={"requested": exact_bytes(asked[1])} if asked else {},
        ran_out=not skipped,
        length=asked.end() if asked else 0,
    )


_POOL: Final = re.compile(
    r"CUDAError:outofmemoryat.{0,120}?cumem_allocator\.cpp|CUresulterror:2(?!\d)(?:\(?outofmemory\)?)?"
)
_WAKES: Final = re.compile(r"wake_up|resume_memory_occupation|in(?:_?resume|resume_)\b")
_ABOVE: Final = 4000
"""Characters of a traceback, without white space, above an engine pool's error."""


def _read_pool(start: re.Match[str], text: str) -> Message:
    above = start.string[max(0, start.start() - _ABOVE) : start.start()]
    return Message("cuda-driver", "engine wakes" if _WAKES.search(above) else "engine pool")


GRAMMARS: Final = (
    Grammar(_TENSORRT, _read_tensorrt),
    Grammar(_ASSERT, _read_assert),
    Grammar(_NCCL, _read_nccl),
    # 0.x: THCudaCheck, then `cuda runtime error (2)`; both are in one log.
    plain(
        "cuda-runtime",
        r"(?i:cudaruntimeerror\(2\):outofmemory(?:at\S{0,200}?:\d{1,6})?)|THCudaCheckFAILfile=.{1,200}?error=2:outofmemory",
        form="thc",
    ),
    Grammar(_POOL, _read_pool),
    plain("cuda-driver", r"NVRM:.{0,200}?NV_ERR_NO_MEMORY", form="kernel module"),
    plain("cuda-driver", r"(?:CUDA|HIP)drivererror:outofmemory"),
    plain(
        "cuda-driver",
        r"(?:CUDA|HIP)drivererror:(?:invalidargument|devicenotready)",
        form="hidden",
        ran_out=False,
    ),
    plain(
        "cuda-runtime",
        r"(?:(?:CUDA|HIP)error|TritonError\[(?:CUDA|HIP)\]):outofmemory|"
        r"(?<![`'])\b(?:cudaErrorMemoryAllocation|hipErrorOutOfMemory|"
        r"CUDA_ERROR_OUT_OF_MEMORY)(?:\b|(?=outofmemory))(?!'in)",
    ),
    plain("xpu-runtime", r"UR_RESULT_ERROR_OUT_OF_(?:RESOURCES|DEVICE_MEMORY|HOST_MEMORY)"),
    plain(
        "cudnn",
        r"(?:cuDNNerror:)?CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_\w{0,20}ALLOCATION_FAILED)",
    ),
    plain("cudnn", r"(?:cuDNNerror:)?CUDNN_STATUS_NOT_INITIALIZED", form="not initialized", ran_out=False),
    plain(
        "cublas",
        r"(?:CUDAerror:)?CUBLAS_STATUS_NOT_INITIALIZED(?:whencalling`[^`]{0,200}`)?",
        form="not initialized",
        ran_out=False,
    ),
    plain(
        "cublas",
        r"(?:CUDAerror:)?(?:CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUFFT|CURAND|HIPFFT|ROCBLAS)_\w{0,20}?"
        r"ALLOC(?:ATION)?_FAILED(?:whencalling`[^`]{0,200}`)?",
    ),
    # Says memory, and is another error.
    plain(
        "not-memory",
        r"illegalmemoryaccesswasencountered|MemoryaccessfaultbyGPUnode",
        form="illegal access",
        ran_out=False,
    ),
    plain(
        "not-memory",
        r"outofresources?:(?:sharedmemory|tensormemory|[\w.]{1,120}?,?Required:\d)",
        form="on-chip shared memory",
        ran_out=False,
    ),
    plain("not-memory", _OTHER_ERRORS, form="device error", ran_out=False),
    plain("not-memory", r"cannotallocatememoryinstaticTLSblock", form="static TLS", ran_out=False),
)
