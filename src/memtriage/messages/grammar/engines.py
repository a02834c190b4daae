"""Messages of inference engines, at start and when their cache is full; lines that only report memory."""

from __future__ import annotations

import re
from typing import Final

from memtriage.messages.grammar.message import Grammar, Message, plain
from memtriage.messages.grammar.sizes import NUMBER, SIZE, to_bytes
from memtriage.model.explanation import Field

_VLLM: Final = re.compile(
    rf"(?P<blocks>Noavailablememoryforthecacheblocks)|"
    rf"Freememoryondevice(?:\w+:\d+)?\((?P<free>{NUMBER})/(?P<total>{NUMBER})GiB\)onstartupislessthandesired"
    rf"GPUmemoryutilization\([\d.]{{1,6}},(?P<desired>{NUMBER})GiB\)|"
    rf"(?P<kv_needed>{NUMBER})GiBKVcacheisneeded,whichislargerthantheavailableKVcachememory\((?P<kv_available>{NUMBER})GiB\)|"
    rf"maxseqlen\((?P<length>\d{{1,12}})\)islargerthanthemaximumnumberoftokensthatcanbestoredinKVcache\((?P<tokens>\d{{1,12}})\)"
)


def _read_vllm(start: re.Match[str], text: str) -> Message:
    names = ("free", "total", "desired", "kv_needed", "kv_available")
    facts: dict[str, str | int] = {}
    if start["length"]:
        facts = {"max_seq_len": int(start["length"]), "kv_tokens": int(start["tokens"])}
    form = "blocks" if start["blocks"] else "startup" if start["free"] else "length"
    return Message("vllm", form, {n: to_bytes(start[n], "GiB") for n in names if start[n]}, facts)


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


def _read_engine(start: re.Match[str], text: str) -> Message:
    names = ("share", "batch", "pool", "preempted", "weights", "report")
    form = next(name for name in names if start[name])
    weights: dict[str, Field] = {"weights": to_bytes(start["took"], start["unit"])} if start["took"] else {}
    return Message("engine", form, weights, ran_out=form in ("share", "batch", "pool"))


_BREAKDOWN: Final = re.compile(
    rf"modelweightstakes?{SIZE};non_torch_memorytakes{SIZE};PyTorchactivationpeakmemorytakes{SIZE};"
    rf"therestofthememoryreservedforKVCacheis{SIZE}"
)
_DEEPSPEED: Final = re.compile(
    rf"(?<!Max_)MA(?P<MA>{NUMBER})GBMax_MA(?P<Max_MA>{NUMBER})GBCA(?P<CA>{NUMBER})GBMax_CA(?P<Max_CA>{NUMBER})GB"
)


def _read_breakdown(start: re.Match[str], text: str) -> Message:
    names, sizes = ("weights", "non_torch", "activation_peak", "kv_cache"), iter(start.groups())
    fields: dict[str, Field] = {name: to_bytes(next(sizes), next(sizes)) for name in names}
    return Message("vllm", "breakdown", fields, ran_out=False)


def _read_deepspeed(start: re.Match[str], text: str) -> Message:
    fields: dict[str, Field] = {name: to_bytes(number, "GB") for name, number in start.groupdict().items()}
    return Message("deepspeed-mem", fields=fields, ran_out=False)


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
