"""Failed allocations of the device allocators: CUDA (1.x, 2.x, cudaMallocAsync), HIP, XPU, MPS.

The forms and what each figure means: `c10/cuda/CUDACachingAllocator.cpp`, `c10/xpu/XPUCachingAllocator.cpp`,
`aten/src/ATen/mps/MPSAllocator.mm` of the releases 0.4 to 2.13. Every figure is searched separately, so a
text that is cut, abridged by hand or reordered still yields what it has.
"""

from __future__ import annotations

import re
from typing import Final

from memtriage.messages.grammar.message import NUMBER, SIZE, Grammar, Message, to_bytes
from memtriage.model.explanation import Field

_BACKENDS: Final = {"CUDA": "cuda", "HIP": "cuda", "XPU": "xpu"}

_CUT_SIZE: Final = rf"(?:{SIZE}|(?!$))"
"""A size, or none where the figure was cut off, and not at the end of the text."""

_FIGURES: Final = {
    name: re.compile(text)
    for name, text in {
        "requested": rf"Triedtoallocate{_CUT_SIZE}|Requested:{SIZE}|Invalidbuffersize:?{SIZE}",
        "total": rf"hasa?totalcapaci?tyof{_CUT_SIZE}|hasa?total{SIZE}|{SIZE}total(?:capacity|;)|"
        rf"Devicelimit:{SIZE}",
        "free": rf"ofwhich{_CUT_SIZE}|{SIZE}free[;)]|Free\(accordingtoCUDA\):{SIZE}",
        "allocated": rf"Oftheallocatedmemory{_CUT_SIZE}|{SIZE}alreadyallocated|Currentlyallocated:{SIZE}|"
        rf"MPSallocated:(?:{SIZE})?",
        "other": rf"otherallocations:(?:{SIZE})?",
        "max_allowed": rf"maxallowed:(?:{SIZE})?",
        "private_pools": rf"with{SIZE}allocatedinprivatepools",
        "reserved_unallocated": rf"{SIZE}isreservedbyPyTorchbut",
        "reserved": rf"{SIZE}reservedintotal",
        "cached": rf"{SIZE}cached",
        "allowed": rf"{SIZE}allowed;|user-suppliedmemoryfraction\):{SIZE}",
        "this_process": rf"thisprocesshas{_CUT_SIZE}",
    }.items()
}
_CUT_ALLOCATED: Final = re.compile(rf"Oftheallocatedmemory({NUMBER})[KMG]?i?$")
_PROCESS: Final = re.compile(rf"Process(\d{{1,10}})has{SIZE}")
_INDEX: Final = re.compile(r"(?:GPU|[A-Z]{3,5})(\d{1,3})(?=;|has|$)")
_NAMED: Final = re.compile(
    r"PYTORCH_(HIP)_ALLOC_CONF|(HIP)Graphs|"
    r"\((?!GPU)([A-Z]{3,5})\d{1,3};|(?<![A-Z])(?!GPU)([A-Z]{3,5})\d{1,3}hasa?total"
)
"""The device's kind where the message does not begin with it: in its hint, its pools, its figures."""
_V1: Final = re.compile(r"\((?:GPU|[A-Z]{3,5})\d*;?|totalcapacity;|alreadyallocated|reservedintotal")
_HINT: Final = re.compile(
    r"try(?:setting)?(max_split_size_mb|PYTORCH_\w{0,8}ALLOC_CONF=expandable_segments:True)|"
    r"use`?(empty_cache)`?torelease|Use(PYTORCH_MPS_HIGH_WATERMARK_RATIO=0\.0)"
)
_END: Final = re.compile(
    r"isreservedbyPyTorchbutunallocated\.?(?:Ifreserved.{0,90}?toavoidfragmentation\.?)?"
    r"(?:Seedocumentationfor\w*(?:\(?https?://[^\s)]{0,120}\)?)?)?|reservedintotalbyPyTorch\)?|cached\)"
)
_WHOLE: Final = {
    "v1": ("requested", "total", "allocated", "free"),
    "v2": ("requested", "total", "free", "allocated", "reserved_unallocated"),
    "async": ("requested", "total", "free", "allocated"),
    "mps": ("allocated", "other", "requested"),
}
"""Figures that a whole message has."""

_START: Final = re.compile(
    r"(?P<mps>MPSbackendoutofmemory(?:\([^)]{0,200}\)?\.?Triedto)?)|(?P<buffer>Invalidbuffersize:?(?=\d))|"
    r"(?P<async>Allocationondevice(?P<index>\d{1,3})?wouldexceedallowedmemory|"
    r"OutOfMemoryError:?(?:[-*]{0,6}ExceptionMessage:[*]{0,2})?Allocationondevice(?!\d{0,3}would))|"
    r"(?P<backend>CUDA|HIP|XPU)outofmemory(?:[.:!]?Triedto)?|(?<![A-Za-z])[Oo]utofmemory\.Triedto|"
    r"(?<!you)Triedtoallocate|torch\.(?:cuda\.)?OutOfMemoryError:?$"
)


def _read(start: re.Match[str], text: str) -> Message | None:
    parts = start.groupdict()
    fields, last = _sizes(text)
    if not fields and not any(parts.values()):
        return None
    if fields.get("this_process") == 0:
        fields["this_process"] = None  # NVML could not tell, as in containers
    processes = [
        {"pid": int(pid), "in_use": to_bytes(number, unit)} for pid, number, unit in _PROCESS.findall(text)
    ]
    if processes:
        fields["processes"] = processes
    facts: dict[str, str | int] = {}
    if hint := _HINT.search(text):
        facts["hint"] = next(group for group in hint.groups() if group is not None)
    if cut := _CUT_ALLOCATED.search(text):
        facts["allocated_cut"] = cut[1]
    if "morethan1EBmemory" in text:
        facts["absurd"] = "more than 1EB"
    named = _NAMED.search(text)
    shared = "XPU" if "unoccupiedcachedmemory" in text else "CUDA"
    backend = parts.get("backend") or (named[named.lastindex or 0] if named else shared)
    kind, wording = backend.lower(), "v1" if _V1.search(text) and backend != "HIP" else "v2"
    index = _INDEX.search(text)
    device = f"{_BACKENDS.get(backend, kind)}:{int(index[1])}" if index else None
    family = f"{kind if backend in _BACKENDS else 'npu'}-{wording}"
    if parts.get("mps") or parts.get("buffer"):
        family = device = wording = "mps"
    elif parts.get("async"):
        family, wording = "cuda-async", "async"
        device = f"cuda:{int(parts['index'])}" if parts["index"] else None
    # XPU's releases before 2.8 do not print what is free, nor does IPEX.
    whole = [name for name in _WHOLE[wording] if not (name == "free" and backend == "XPU")]
    ends = [match.end() for pattern in (_HINT, _END) if (match := pattern.search(text))]
    return Message(
        family=family,
        form="buffer" if parts.get("buffer") else "",
        fields=fields,
        facts=facts,
        device=device,
        missing=tuple(n for n in (["requested"] if parts.get("buffer") else whole) if fields.get(n) is None),
        length=max(last, *ends) if ends else last,
    )


def _sizes(text: str) -> tuple[dict[str, Field], int]:
    """Return the figures that a text has, None for one that is promised and cut off, and where they end."""
    fields: dict[str, Field] = {}
    end = 0
    for name, pattern in _FIGURES.items():
        for match in pattern.finditer(text):
            fields[name] = None
            if size := [group for group in match.groups() if group is not None]:
                fields[name] = to_bytes(*size)
                end = max(end, match.end())
                break
    return fields, end


GRAMMARS: Final = (Grammar(_START, _read),)
HEADLESS: Final = Grammar(
    re.compile(
        rf"(?:GPU\d{{1,3}}hasatotalcapaci?tyof|\(GPU\d{{1,3}};|Oftheallocatedmemory|"
        rf"{NUMBER}[KMG]iBalreadyallocated|{NUMBER}[KMG]iBreservedintotalbyPyTorch)"
    ),
    _read,
)
"""For texts that begin in the middle of a message; asked where no other grammar finds anything."""
