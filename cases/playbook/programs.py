"""The programs of the rungs M4 to M13, as they are and with the change that the playbook names.

Every `build` takes a device and returns `(model, optimizer, step)`, as `memtriage predict` and `memtriage
plan` want it. FULL sizes are for an H200; TINY ones show the same on a CPU within seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

Build = Callable[..., tuple[torch.nn.Module, Any, Callable[[], None]]]
Change = Literal[
    "micro-batch", "bf16 autocast", "checkpointing", "expandable segments", "sharding",
    "offloaded optimizer", "attention", "8-bit optimizer", "LoRA",
]  # fmt: skip
RANKS = 2
MICRO_BATCHES = 4
"""Into so many the batch is split by the change `micro-batch`."""
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama and its batch; `lengths` gives a step several micro-batches of different lengths."""

    hidden: int = 2048
    layers: int = 12
    vocabulary: int = 4096
    batch: int = 8
    length: int = 1024
    head: int = 128
    dtype: torch.dtype = torch.bfloat16
    attention: str = "sdpa"
    lengths: tuple[int, ...] = ()

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // self.head,
            num_key_value_heads=self.hidden // self.head,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(self.length, *self.lengths, 1),
            attn_implementation=self.attention,
            bos_token_id=1,
            eos_token_id=2,
        )


@dataclass(frozen=True, slots=True)
class Rung:
    """A program and what is done about it.

    Attributes:
        entry: of the playbook.
        changes: names of memtriage's rungs.
        budget: what `memtriage plan` is asked to keep to.
        full, tiny: its size on a GPU and on a CPU.
        tunable: the program has a keyword for its micro-batch.
        allow: rungs that the plan may take although they change the task.
        ranks: GPUs of the job.
        absent_on_cpu: why there is nothing to measure on a CPU; empty where there is.
    """

    entry: str
    changes: tuple[Change, ...]
    budget: str
    full: Size
    tiny: Size
    tunable: bool = False
    allow: tuple[str, ...] = ()
    ranks: int = 1
    absent_on_cpu: str = ""

    def build(self, *, changed: bool, tiny: bool = False) -> Build:
        """The program, as it is or changed."""
        size = self.tiny if tiny else self.full
        return program(size, self.changes if changed else (), tunable=self.tunable)

    @property
    def conf(self) -> str:
        """Options of the allocator that the changes consist of."""
        return "expandable_segments:True" if "expandable segments" in self.changes else ""


_BATCH = Size(batch=16)
_STATES = Size(batch=1, length=256)
_STATES_32 = Size(batch=1, length=256, dtype=torch.float32)
_EAGER = Size(batch=4, length=2048, attention="eager")
_LENGTHS = (256, 512, 768, 1024, 1280, 1536)
_SMALL = Size(hidden=256, layers=4, head=64, vocabulary=512, batch=16, length=256, dtype=torch.float32)
_SMALL_EAGER = replace(_SMALL, batch=4, length=512, attention="eager")
_SMALL_STATES = Size(hidden=512, layers=8, head=64, vocabulary=1024, batch=1, length=32, dtype=torch.float32)

RUNGS = {
    rung.entry: rung
    for rung in (
        Rung("M4", ("attention", "checkpointing"), "8GiB", _EAGER, _SMALL_EAGER),
        Rung("M5", ("micro-batch",), "12GiB", _BATCH, _SMALL, tunable=True),
        Rung("M6", ("bf16 autocast",), "20GiB", Size(layers=6, batch=16, dtype=torch.float32), _SMALL),
        Rung("M7", ("checkpointing",), "10GiB", _BATCH, _SMALL),
        Rung(
            "M8", ("expandable segments",), "19GiB", Size(layers=6, lengths=_LENGTHS, batch=16), _SMALL,
            absent_on_cpu="malloc has no segments",
        ),
        Rung(
            "M9", ("sharding",), "7GiB", _STATES_32, _SMALL_STATES, ranks=RANKS,
            absent_on_cpu="what is sharded is a device's memory",
        ),
        Rung(
            "M10", ("offloaded optimizer",), "4GiB", _STATES, _SMALL_STATES,
            absent_on_cpu="the state is on the host already",
        ),
        Rung("M11", ("attention",), "16GiB", _EAGER, _SMALL_EAGER),
        Rung(
            "M12", ("8-bit optimizer",), "9GiB", _STATES_32, _SMALL_STATES,
            absent_on_cpu="torchao compiles its step, and the compiler takes more than the state",
        ),
        Rung("M13", ("LoRA",), "3.2GiB", _STATES, _SMALL_STATES, allow=("LoRA",)),
    )
}  # fmt: skip


def program(size: Size, changes: Collection[Change] = (), *, tunable: bool = False) -> Build:
    """The build function of a program with changes; `tunable` gives it a keyword for its batch."""
    accumulate = 1
    if "micro-batch" in changes:
        size, accumulate = replace(size, batch=size.batch // MICRO_BATCHES), MICRO_BATCHES
    if "attention" in changes:
        size = replace(size, attention="sdpa")
    if not tunable:
        return lambda device: _training(size, changes, device, size.batch, accumulate)

    def build(device: Any, micro_batch: int = size.batch) -> Any:
        return _training(size, changes, device, micro_batch, accumulate)

    return build


def _training(size: Size, changes: Collection[Change], device: Any, batch: int, accumulate: int) -> Any:
    device = torch.device(device)
    model = _model(size, device).train()
    if "LoRA" in changes:
        _add_adapters(model)
    if "sharding" in changes:
        _shard(model)
    if "checkpointing" in changes:
        checkpoint_blocks(model)
    if "bf16 autocast" in changes:
        model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)
    optimizer = _optimizer(
        [parameter for parameter in model.parameters() if parameter.requires_grad], changes
    )
    lengths: Sequence[int] = size.lengths or (size.length,) * accumulate

    def step() -> None:
        for length in lengths:
            ids = torch.randint(0, size.vocabulary, (batch, length), device=device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / len(lengths)).backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _model(size: Size, device: torch.device) -> LlamaForCausalLM:
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(size.dtype)
        try:
            return LlamaForCausalLM(size.config)
        finally:
            torch.set_default_dtype(before)


def checkpoint_blocks(model: Any) -> None:
    """Every block is computed again in backward."""
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable = getattr(model, f"{word}_checkpointing_enable")  # Transformers 5 changed the word
    enable(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}})


def _add_adapters(model: torch.nn.Module) -> None:
    import peft

    names = [
        name
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    ]
    peft.inject_adapter_in_model(peft.LoraConfig(r=LORA_RANK, target_modules=names), model)
    for part in model.parameters():
        if part.requires_grad:
            part.data = part.data.float()  # as get_peft_model does


def _shard(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)


def _optimizer(parameters: list[torch.nn.Parameter], changes: Collection[Change]) -> Any:
    if "offloaded optimizer" in changes:
        import memtriage

        return memtriage.OffloadedAdamW(parameters)
    if "8-bit optimizer" in changes:
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters)
    return torch.optim.AdamW(parameters, fused=True)


def one_of_ranks() -> None:
    """Makes this process rank 0 of a job whose other ranks do not exist, so that nothing is communicated."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(RANKS))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


def _named(entry: str) -> Build:
    return RUNGS[entry].build(changed=False)


m4, m5, m6, m7, m8, m9, m10, m11, m12, m13 = map(_named, RUNGS)
"""For the command line: `memtriage plan programs.py:m7 --budget 10GiB`."""
