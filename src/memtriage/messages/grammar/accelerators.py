"""Failed allocations of the device allocators: CUDA (1.x, 2.x, cudaMallocAsync), HIP, XPU, MPS.

The forms and what each figure means: `c10/cuda/CUDACachingAllocator.cpp`, `c10/xpu/XPUCachingAllocator.cpp`,
`aten/src/ATen/mps/MPSAllocator.mm` of the releases 0.4 to 2.13. Every figure is searched separately, so a
text that is cut, abridged by hand or reordered still yields what it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

from memtriage.messages.grammar.message import Family, Grammar, Message
from memtriage.messages.grammar.sizes import NUMBER, SIZE, to_bytes
from memtriage.model.explanation import Field

_BACKENDS: Final = {"CUDA": "cuda", "HIP": "cuda", "XPU": "xpu"}

_CUT_SIZE: Final = rf"(?:{SIZE}|(?!$))"
"""A size, or none where the figure was cut off, and not at the end of the text."""

_FIGURES: Final = {
    name: re.compile(text)
    for name, text in {
        "requested": rf"Triedtoallocate{_CUT_SIZE}",
        "total": rf"hasa?totalcapaci?tyof{_CUT_SIZE}|hasa?total{SIZE}|{SIZE}total(?:capacity|;)",
        "free": rf"ofwhich{_CUT_SIZE}|{SIZE}free[;)]",
        "allocated": rf"Oftheallocatedmemory{_CUT_SIZE}|{SIZE}alreadyallocated",
        "private_pools": rf"with{SIZE}allocatedinprivatepools",
        "reserved_unallocated": rf"{SIZE}isreservedbyPyTorchbut",
        "reserved": rf"{SIZE}reservedintotal",
        "cached": rf"{SIZE}cached",
        "allowed": rf"{SIZE}allowed;",
        "this_process": rf"thisprocesshas{_CUT_SIZE}",
    }.items()
}
_CUT_ALLOCATED: Final = re.compile(rf"Oftheallocatedmemory({NUMBER})[KMG]?i?$")
_PROCESS: Final = re.compile(rf"Process(\d{{1,10}})has{SIZE}")
_INDEX: Final = re.compile(r"(?:GPU|[A-Z]{3,5})(\d{1,3})(?=;|has|$)")
_NAMED: Final = re.compile(r"\((?!GPU)([A-Z]{3,5})\d{1,3};|(?<![A-Z])(?!GPU)([A-Z]{3,5})\d{1,3}hasa?total")
"""The device's kind in the messages of an allocator outside of PyTorch's own tree."""
_V1: Final = re.compile(r"\((?:GPU|[A-Z]{3,5})\d*;?|totalcapacity;|alreadyallocated|reservedintotal")
_HINT: Final = re.compile(
    r"try(?:setting)?(max_split_size_mb|PYTORCH_\w{0,8}ALLOC_CONF=expandable_segments:True)|"
    r"use`?(empty_cache)`?torelease|Use(PYTORCH_MPS_HIGH_WATERMARK_RATIO=0\.0)"
)
_END: Final = re.compile(
    r"isreservedbyPyTorchbutunallocated\.?(?:Ifreserved.{0,90}?toavoidfragmentation\.?)?"
    r"(?:Seedocumentationfor\w*(?:\(?https?://[^\s)]{0,120}\)?)?)?|reservedintotalbyPyTorch\)?|cached\)"
)
_WHOLE_V1: Final = ("requested", "total", "allocated", "free")
_WHOLE_V2: Final = ("requested", "total", "free", "allocated", "reserved_unallocated")

_START: Final = re.compile(
    r"(?P<backend>CUDA|HIP|XPU)outofmemory(?:[.:!]?Triedto)?|(?<![A-Za-z])[Oo]utofmemory\.Triedto|"
    r"(?<!you)Triedtoallocate|torch\.(?:cuda\.)?OutOfMemoryError:?$"
)


def _read(start: re.Match[str], text: str) -> Message | None:
    backend = start["backend"] or _backend_named(text)
    fields, last = _sizes(text, _FIGURES)
    if not fields and start["backend"] is None:
        return None
    if fields.get("this_process") == 0:
        fields["this_process"] = None  # NVML could not tell, as in containers
    processes = [
        {"pid": int(pid), "in_use": to_bytes(number, unit)} for pid, number, unit in _PROCESS.findall(text)
    ]
    if processes:
        fields["processes"] = processes
    facts = _hint(text)
    if cut := _CUT_ALLOCATED.search(text):
        facts["allocated_cut"] = cut[1]
    if "morethan1EBmemory" in text:
        facts["absurd"] = "more than 1EB"
    old = _V1.search(text) is not None
    # XPU's releases before 2.8 do not print what is free, nor does IPEX.
    expected = [
        name for name in (_WHOLE_V1 if old else _WHOLE_V2) if not (name == "free" and backend == "XPU")
    ]
    index = _INDEX.search(text)
    ends = [match.end() for pattern in (_HINT, _END) if (match := pattern.search(text))]
    return Message(
        family=_family(backend, old),
        fields=fields,
        facts=facts,
        device=f"{_BACKENDS.get(backend, backend.lower())}:{int(index[1])}" if index else None,
        missing=tuple(name for name in expected if fields.get(name) is None),
        length=max(last, *ends) if ends else last,
    )


def _sizes(text: str, patterns: Mapping[str, re.Pattern[str]]) -> tuple[dict[str, Field], int]:
    """Return the figures that a text has, None for one that is promised and cut off, and where they end."""
    fields: dict[str, Field] = {}
    end = 0
    for name, pattern in patterns.items():
        for match in pattern.finditer(text):
            fields[name] = None
            if size := [group for group in match.groups() if group is not None]:
                fields[name] = to_bytes(*size)
                end = max(end, match.end())
                break
    return fields, end


def _hint(text: str) -> dict[str, str | int]:
    """Return the advice that a message gives."""
    match = _HINT.search(text)
    return {} if match is None else {"hint": next(group for group in match.groups() if group is not None)}


def _backend_named(text: str) -> str:
    """The shared allocator names no backend in its message; its hint and its private pools may."""
    if re.search(r"PYTORCH_HIP_ALLOC_CONF|HIPGraphs", text):
        return "HIP"
    if "unoccupiedcachedmemory" in text:
        return "XPU"
    named = _NAMED.search(text)
    return "CUDA" if named is None else named[1] or named[2]


def _family(backend: str, old: bool) -> Family:
    kind = {"CUDA": "cuda", "HIP": "hip", "XPU": "xpu"}.get(backend, "npu")
    return cast("Family", f"{kind}-{'v1' if old and kind != 'hip' else 'v2'}")


# cudaMallocAsync

_ASYNC_START: Final = re.compile(
    r"Allocationondevice(\d{1,3})?wouldexceedallowedmemory|"
    r"OutOfMemoryError:?(?:[-*]{0,6}ExceptionMessage:[*]{0,2})?Allocationondevice(?!\d{0,3}would)"
)
_ASYNC: Final = {
    name: re.compile(text)
    for name, text in {
        "requested": rf"Requested:{SIZE}",
        "total": rf"Devicelimit:{SIZE}",
        "free": rf"Free\(accordingtoCUDA\):{SIZE}",
        "allocated": rf"Currentlyallocated:{SIZE}",
        "allowed": rf"user-suppliedmemoryfraction\):{SIZE}",
    }.items()
}


def _read_async(start: re.Match[str], text: str) -> Message:
    fields, end = _sizes(text, _ASYNC)
    return Message(
        family="cuda-async",
        fields=fields,
        device=f"cuda:{int(start[1])}" if start[1] else None,
        missing=tuple(name for name in ("requested", "total", "free", "allocated") if name not in fields),
        length=end,
    )


# Metal

_MPS_START: Final = re.compile(
    r"MPSbackendoutofmemory(?:\([^)]{0,200}\)?\.?Triedto)?|Invalidbuffersize:?(?=\d)"
)
_MPS: Final = {
    name: re.compile(text)
    for name, text in {
        "allocated": rf"MPSallocated:(?:{SIZE})?",
        "other": rf"otherallocations:(?:{SIZE})?",
        "max_allowed": rf"maxallowed:(?:{SIZE})?",
        "requested": rf"Triedtoallocate(?:{SIZE})?|Invalidbuffersize:?{SIZE}",
    }.items()
}


def _read_mps(start: re.Match[str], text: str) -> Message:
    single = start[0].startswith("Invalid")
    fields, end = _sizes(text, _MPS)
    expected = ("requested",) if single else ("allocated", "other", "requested")
    return Message(
        family="mps",
        form="buffer" if single else "",
        fields=fields,
        facts=_hint(text),
        device="mps",
        missing=tuple(name for name in expected if fields.get(name) is None),
        length=end,
    )


GRAMMARS: Final = (
    Grammar(_MPS_START, _read_mps),
    Grammar(_ASYNC_START, _read_async),
    Grammar(_START, _read),
)
HEADLESS: Final = Grammar(
    re.compile(
        rf"(?P<backend>(?!))?(?:GPU\d{{1,3}}hasatotalcapaci?tyof|\(GPU\d{{1,3}};|Oftheallocatedmemory|"
        rf"{NUMBER}[KMG]iBalreadyallocated|{NUMBER}[KMG]iBreservedintotalbyPyTorch)"
    ),
    _read,
)
"""For texts that begin in the middle of a message; asked where no other grammar finds anything."""
