"""Messages of inference engines, at start and when their cache is full; lines that only report memory."""

from __future__ import annotations

import re
from typing import Final

from memtriage.messages.grammar.message import Grammar, Message, plain
from memtriage.messages.grammar.sizes import NUMBER, SIZE, to_bytes
from memtriage.model.explanation import Field

_GIB: Final = "GiB"

_VLLM: Final = re.compile(
    rf"(?P<blocks>Noavailablememoryforthecacheblocks)|"
    rf"Freememoryondevice(?:\w+:\d+)?\((?P<free>{NUMBER})/(?P<total>{NUMBER})GiB\)onstartupislessthandesired"
    rf"GPUmemoryutilization\((?P<share>[\d.]{{1,6}}),(?P<desired>{NUMBER})GiB\)|"
    rf"(?P<needed>{NUMBER})GiBKVcacheisneeded,whichislargerthantheavailableKVcachememory\((?P<available>{NUMBER})GiB\)|"
    rf"maxseqlen\((?P<length>\d{{1,12}})\)islargerthanthemaximumnumberoftokensthatcanbestoredinKVcache\((?P<tokens>\d{{1,12}})\)"
)


def _read_vllm(start: re.Match[str], text: str) -> Message:
    groups = start.groupdict()
    names = {
        "free": "free",
        "total": "total",
        "desired": "desired",
        "needed": "kv_needed",
        "available": "kv_available",
    }
    fields: dict[str, Field] = {
        name: to_bytes(groups[group], _GIB) for group, name in names.items() if groups[group]
    }
    facts: dict[str, str | int] = {}
    if groups["share"]:
        facts["utilization"] = groups["share"]
    if groups["length"]:
        facts |= {"max_seq_len": int(groups["length"]), "kv_tokens": int(groups["tokens"])}
    form = "blocks" if groups["blocks"] else "startup" if groups["free"] else "length"
    return Message("vllm", form=form, fields=fields, facts=facts, length=len(start[0]))


_ENGINE: Final = re.compile(
    r"(?P<share>(?:[Nn]otenough|[Ii]nsufficient)\w{0,12}memory\.?[^\n]{0,60}?--mem-fraction)|"
    r"(?P<batch>[Nn]otenoughmemorytohandle\d{1,12}\w{0,20}tokens)|"
    r"(?P<pool>(?:[Pp]refill|[Dd]ecode)outofmemory\.|[Nn]ospaceleftforonlyonerequest|"
    r"[Mm]aximumpoolsizeexceeded)|"
    r"(?P<preempted>preemptedbyPreemptionMode|(?:KVcachepoolisfull\.)?Retractrequests|"
    r"failedtofindfreespaceintheKVcache,retrying)|"
    rf"(?P<weights>Model(?:weights)?loadingtook(?P<took>{NUMBER})(?P<unit>GiB|GB)memory)|"
    rf"(?P<report>Freememoryondevice(?:\w+:\d+)?\({NUMBER}/{NUMBER}GiB\)onstartup\.)"
)
"""Engines that hand out a share of the device by themselves: the share is used up, and not the device."""
_ENGINE_FORMS: Final = ("share", "batch", "pool", "preempted", "weights", "report")


def _read_engine(start: re.Match[str], text: str) -> Message:
    form = next(name for name in _ENGINE_FORMS if start[name])
    weights: dict[str, Field] = {"weights": to_bytes(start["took"], start["unit"])} if start["took"] else {}
    return Message(
        "engine", form=form, fields=weights, ran_out=form in ("share", "batch", "pool"), length=len(start[0])
    )


_BREAKDOWN: Final = re.compile(
    rf"modelweightstakes?{SIZE};non_torch_memorytakes{SIZE};PyTorchactivationpeakmemorytakes{SIZE};"
    rf"therestofthememoryreservedforKVCacheis{SIZE}"
)
_BREAKDOWN_NAMES: Final = ("weights", "non_torch", "activation_peak", "kv_cache")

_DEEPSPEED: Final = re.compile(
    rf"(?<!Max_)MA(?P<MA>{NUMBER})GBMax_MA(?P<Max_MA>{NUMBER})GBCA(?P<CA>{NUMBER})GBMax_CA(?P<Max_CA>{NUMBER})GB"
)


def _read_breakdown(start: re.Match[str], text: str) -> Message:
    sizes = start.groups()
    fields: dict[str, Field] = {
        name: to_bytes(sizes[2 * i], sizes[2 * i + 1]) for i, name in enumerate(_BREAKDOWN_NAMES)
    }
    return Message("vllm", form="breakdown", fields=fields, ran_out=False, length=len(start[0]))


def _read_deepspeed(start: re.Match[str], text: str) -> Message:
    fields: dict[str, Field] = {name: to_bytes(number, "GB") for name, number in start.groupdict().items()}
    return Message("deepspeed-mem", fields=fields, ran_out=False, length=len(start[0]))


GRAMMARS: Final = (
    Grammar(_VLLM, _read_vllm),
    Grammar(_ENGINE, _read_engine),
    Grammar(_BREAKDOWN, _read_breakdown),
    Grammar(_DEEPSPEED, _read_deepspeed),
    plain(
        "deepspeed-mem",
        r"\d{1,9}pytorchallocatorcacheflushessincelaststep(?:\.thishappens.{0,400}?performance)?",
        form="flushes",
        ran_out=False,
    ),
)
