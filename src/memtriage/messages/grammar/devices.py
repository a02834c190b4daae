"""Failures of the device without sizes, messages of inference engines, and what others say of a death."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from memtriage.messages.grammar.message import NUMBER, Grammar, Message, plain, to_bytes
from memtriage.model.explanation import Field

_FILE: Final = r'at"?[^"]{0,300}?CachingAllocator\.cpp"?:\d{1,6}'

_NCCL: Final = re.compile(
    r"(?:[\w.-]{1,64}:\d+:\d+\[(?P<rank>\d+)\][^|]{0,80}?)?"
    r"(?:Cudafailure(?:\d+)?'outofmemory'|"
    r"FailedtoCUDA(?:[mc]alloc)(?:async)?(?P<asked>\d{1,20})bytes|"
    r"(?:FailedtobindNVLinkSHARP\(NVLS\)|NVLS)Multicastmemoryofsize(?P<bound>\d{1,20})"
    r"(?::CUDAerror2'outofmemory')?)"
)


def _read_nccl(start: re.Match[str], text: str) -> Message:
    size = start["asked"] or start["bound"]
    fields: dict[str, Field] = {"requested": to_bytes(size)} if size else {}
    facts: dict[str, str | int] = {} if start["rank"] is None else {"rank": int(start["rank"])}
    return Message("nccl", "multicast" if start["bound"] else "", fields, facts)


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
        fields={"requested": to_bytes(asked[1])} if asked else {},
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


_FORMS: Final[Mapping[tuple[str, str], str]] = {
    ("nvml-assert", ""): rf"NVML_SUCCESS==[^\"]{{1,200}}?INTERNALASSERTFAILED(?:{_FILE})?",
    ("alloc-assert", ""): rf"!block->expandable_segment_INTERNALASSERTFAILED(?:{_FILE})?",
    ("alloc-assert", "other"): rf"INTERNALASSERTFAILED{_FILE}",
    # 0.x: THCudaCheck, then `cuda runtime error (2)`; both are in one log.
    ("cuda-runtime", "thc"): r"(?i:cudaruntimeerror\(2\):outofmemory(?:at\S{0,200}?:\d{1,6})?)|"
    r"THCudaCheckFAILfile=.{1,200}?error=2:outofmemory",
    ("cuda-driver", "kernel module"): r"NVRM:.{0,200}?NV_ERR_NO_MEMORY",
    ("cuda-driver", ""): r"(?:CUDA|HIP)drivererror:outofmemory",
    ("cuda-driver", "hidden"): r"(?:CUDA|HIP)drivererror:(?:invalidargument|devicenotready)",
    ("cuda-runtime", ""): r"(?:(?:CUDA|HIP)error|TritonError\[(?:CUDA|HIP)\]):outofmemory|"
    r"(?<![`'])\b(?:cudaErrorMemoryAllocation|hipErrorOutOfMemory|"
    r"CUDA_ERROR_OUT_OF_MEMORY)(?:\b|(?=outofmemory))(?!'in)",
    ("xpu-runtime", ""): r"UR_RESULT_ERROR_OUT_OF_(?:RESOURCES|DEVICE_MEMORY|HOST_MEMORY)",
    ("cudnn", ""): r"(?:cuDNNerror:)?CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_\w{0,20}ALLOCATION_FAILED)",
    ("cudnn", "not initialized"): r"(?:cuDNNerror:)?CUDNN_STATUS_NOT_INITIALIZED",
    ("cublas", "not initialized"): r"(?:CUDAerror:)?CUBLAS_STATUS_NOT_INITIALIZED"
    r"(?:whencalling`[^`]{0,200}`)?",
    ("cublas", ""): r"(?:CUDAerror:)?(?:CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUFFT|CURAND|HIPFFT|ROCBLAS)_"
    r"\w{0,20}?ALLOC(?:ATION)?_FAILED(?:whencalling`[^`]{0,200}`)?",
    # Says memory, and is another error.
    ("not-memory", "illegal access"): r"illegalmemoryaccesswasencountered|MemoryaccessfaultbyGPUnode",
    ("not-memory", "on-chip shared memory"): r"outofresources?:(?:sharedmemory|tensormemory|"
    r"[\w.]{1,120}?,?Required:\d)",
    ("not-memory", "device error"): r"(?:(?:CUDA|HIP)(?:runtime|kernel|driver)?error|"
    r"TritonError\[(?:CUDA|HIP)\]):"
    r"(?:device-sideasserttriggered|misalignedaddress|unspecifiedlaunch(?:failure)?|anillegalinstruction|"
    r"invaliddeviceordinal|nokernelimageisavailable|thelaunchtimedout|uncorrectableECCerror|"
    r"invalidconfigurationargument|invaliddevicefunction|invalidpc|hardwarestackerror)|"
    r"block:\[\d+,\d+,\d+\],thread:\[\d+,\d+,\d+\]Assertion",
    ("not-memory", "static TLS"): r"cannotallocatememoryinstaticTLSblock",
}
GRAMMARS: Final = (
    Grammar(_TENSORRT, _read_tensorrt),
    Grammar(_NCCL, _read_nccl),
    Grammar(_POOL, _read_pool),
    *(plain(family, words, form=form) for (family, form), words in _FORMS.items()),
)

# Engines, which share out the device by themselves, and what follows from a failure and explains nothing

_ENGINES: Final[Mapping[tuple[str, str], str]] = {
    ("vllm", "blocks"): r"Noavailablememoryforthecacheblocks",
    ("vllm", "startup"): rf"Freememoryondevice(?:\w+:\d+)?\((?P<free>{NUMBER})/(?P<total>{NUMBER})GiB\)"
    rf"onstartupislessthandesiredGPUmemoryutilization\([\d.]{{1,6}},(?P<desired>{NUMBER})GiB\)",
    ("vllm", "length"): rf"(?P<kv_needed>{NUMBER})GiBKVcacheisneeded,whichislargerthantheavailable"
    rf"KVcachememory\((?P<kv_available>{NUMBER})GiB\)",
    ("engine", "share"): r"(?:[Nn]otenough|[Ii]nsufficient)\w{0,12}memory\.?[^\n]{0,60}?--mem-fraction",
    ("engine", "batch"): r"[Nn]otenoughmemorytohandle\d{1,12}\w{0,20}tokens",
    ("engine", "pool"): r"(?:[Pp]refill|[Dd]ecode)outofmemory\.|[Nn]ospaceleftforonlyonerequest|"
    r"[Mm]aximumpoolsizeexceeded",
    ("engine", "preempted"): r"preemptedbyPreemptionMode|(?:KVcachepoolisfull\.)?Retractrequests|"
    r"failedtofindfreespaceintheKVcache,retrying",
    ("engine", "weights"): rf"Model(?:weights)?loadingtook(?P<weights>{NUMBER}(?:GiB|GB))memory",
    ("engine", "report"): rf"Freememoryondevice(?:\w+:\d+)?\({NUMBER}/{NUMBER}GiB\)onstartup\.",
    ("vllm", "breakdown"): rf"modelweightstakes?(?P<weights>{NUMBER}[KMG]iB);"
    rf"non_torch_memorytakes(?P<non_torch>{NUMBER}[KMG]iB);"
    rf"PyTorchactivationpeakmemorytakes(?P<activation_peak>{NUMBER}[KMG]iB);"
    rf"therestofthememoryreservedforKVCacheis(?P<kv_cache>{NUMBER}[KMG]iB)",
    ("deepspeed-mem", ""): rf"(?<!Max_)MA(?P<MA>{NUMBER})GBMax_MA(?P<Max_MA>{NUMBER})GB"
    rf"CA(?P<CA>{NUMBER})GBMax_CA(?P<Max_CA>{NUMBER})GB",
    ("deepspeed-mem", "flushes"): r"\d{1,9}pytorchallocatorcacheflushessincelaststep"
    r"(?:\.thishappens.{0,400}?performance)?",
    ("aftermath", "collective timed out"): r"[Ww]atchdogcaughtcollectiveoperationtimeout|"
    r"SomeNCCLoperationshavefailedortimedout|Timedoutwaiting\d+msfor(?:recv|send)",
    ("aftermath", "watchdog ended the process"): r"[Ww]atchdogthreadterminatedwithexception|"
    r"totakedownthe(?:entire)?process",
    ("aftermath", "peer lost"): r"remoteprocessexited|Connection(?:closedby(?:remote)?peer|resetbypeer|"
    r"closedbyremote)|socketTimeout|NCCLWARN.{0,60}?(?:[Cc]onnectionclosed|peerclosed)|ncclRemoteError",
    ("aftermath", "ended by the launcher"): r"(?:Sendingprocess\d{1,10})?closingsignalSIG(?:TERM|KILL|INT)|"
    r"Terminatingprocessesforlocal_rank|srun:(?:error:)?(?:Terminating|Jobstepaborted)",
    ("aftermath", "launcher's report"): r"ChildFailedError|failed\(exitcode:1\)|"
    r"Rootcause\(firstobservedfailure\)",
}
"""Their sizes are in GiB where they have no unit."""
ENGINES: Final = (
    plain(
        "vllm",
        r"maxseqlen\((?P<max_seq_len>\d{1,12})\)islargerthanthemaximumnumberoftokensthatcanbestoredinKVcache"
        r"\((?P<kv_tokens>\d{1,12})\)",
        form="length",
    ),
    *(plain(family, words, form=form, unit="GiB") for (family, form), words in _ENGINES.items()),
)
