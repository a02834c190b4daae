"""Activation checkpointing, of every block or of some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch.utils.checkpoint import checkpoint

from memtriage.planning.changes import Change, Changes, Offer, Rung
from memtriage.planning.facts import Facts, HuggingFace, RepeatedBlocks, huggingface_in
from memtriage.prediction.build import Built


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """Which blocks are checkpointed: the fewer, the less is computed again.

    Attributes:
        words: what they are called.
        of: one in so many blocks is special.
        others: all but the special ones are checkpointed, not these.
    """

    words: str
    of: int
    others: bool = False

    @property
    def condition(self) -> str:
        """The choice in Python, by the `number` of the block; empty for every block."""
        return "" if self.of == 1 else f"number % {self.of} {'!=' if self.others else '=='} 0"

    def among(self, blocks: tuple[str, ...]) -> list[str]:
        """The chosen blocks."""
        return [name for number, name in enumerate(blocks) if (number % self.of != 0) == self.others]


CHOICES: Final = (
    BlockChoice("every fourth block", 4),
    BlockChoice("every third block", 3),
    BlockChoice("every second block", 2),
    BlockChoice("all but every third block", 3, others=True),
    BlockChoice("all but every fourth block", 4, others=True),
    BlockChoice("every block", 1),
)
"""From the mildest to the one that saves most."""
_NAME: Final = "checkpointing"


def _offer(facts: Facts) -> Offer:
    if facts.compiled:
        return (
            "the program is compiled: torch._functorch.config.activation_memory_budget below 1 has "
            "the backward compute more again"
        )
    if not facts.levels:
        return (
            "the model has no nn.ModuleList or nn.Sequential of repeated blocks: call "
            "torch.utils.checkpoint.checkpoint(part, input, use_reentrant=False) for parts of it"
        )
    usable = [level for level in facts.levels if set(level.blocks) <= facts.called]
    if not usable:
        names = ", ".join(facts.levels[0].containers)
        return (
            f"the blocks of {names} are never called as modules: call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) where their work is done"
        )
    fresh = [level for level in usable if not facts.recomputed.intersection(level.blocks)]
    if len(fresh) < len(usable):
        return "its blocks are checkpointed already"
    return tuple(_track(level, facts.huggingface) for level in fresh)


def _track(level: RepeatedBlocks, huggingface: HuggingFace | None) -> Changes:
    switch = huggingface if huggingface is not None and huggingface.supports_checkpointing else None
    return tuple(
        _wrapped(level, choice)
        if switch is None or not level.own_switch
        else _switched(level, choice, switch)
        for choice in CHOICES
        if len(level.blocks) >= 2 * choice.of or choice.of == 1
    )


def _change(
    level: RepeatedBlocks, choice: BlockChoice, code: dict[str, str], edit: Callable[[Built], Built]
) -> Change:
    count = len(choice.among(level.blocks))
    return Change(
        rung=_NAME,
        action=f"checkpoint {choice.words} of {_containers(level)} ({count} of {len(level.blocks)})",
        speed="backward runs the checkpointed blocks forward again, as far as it needs",
        maths="same",
        maths_note="but batch norm's running statistics, which both forward passes update",
        code=code,
        edit=edit,
        counts_work=True,
    )


def _wrapped(level: RepeatedBlocks, choice: BlockChoice) -> Change:
    def edit(built: Built) -> Built:
        for name in choice.among(level.blocks):
            block = built.model.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return built

    wrap = "block.forward = partial(checkpoint, block.forward, use_reentrant=False)"
    loop = f"for number, block in enumerate({in_python(level)}):\n    if {choice.condition}:\n        {wrap}"
    if not choice.condition:
        loop = f"for block in {in_python(level)}:\n    {wrap}"
    imports = "from functools import partial\nfrom torch.utils.checkpoint import checkpoint\n"
    return _change(level, choice, {"torch": imports + loop}, edit)


def _switched(level: RepeatedBlocks, choice: BlockChoice, huggingface: HuggingFace) -> Change:
    """By the switch that Transformers' layers have, which also sees to their key-value caches."""
    word = huggingface.checkpointing
    arguments = {"use_reentrant": False}
    chosen = set(choice.among(level.blocks))

    def edit(built: Built) -> Built:
        enable = getattr(huggingface_in(built.model), f"{word}_enable")
        enable(**{f"{word}_kwargs": arguments})
        for name in level.blocks:
            built.model.get_submodule(name).gradient_checkpointing = name in chosen
        return built

    code = {"torch": f"model.{word}_enable({word}_kwargs={arguments})"}
    if choice.condition:
        code["torch"] += (
            f"\nfor number, block in enumerate({in_python(level)}):\n"
            f"    block.gradient_checkpointing = {choice.condition}"
        )
    else:
        code["trainer"] = f"TrainingArguments({word}=True, {word}_kwargs={arguments})"
    return _change(level, choice, code, edit)


def in_python(level: RepeatedBlocks) -> str:
    """The blocks, in Python."""
    places = [_place(name) for name in level.containers]
    return places[0] if len(places) == 1 else f"[{', '.join(f'*{place}' for place in places)}]"


def _place(name: str) -> str:
    parts = name.split(".") if name else []
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def _containers(level: RepeatedBlocks) -> str:
    names = [name or "the model" for name in level.containers]
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]}, ... {names[-1]}"


_NAMED: Final = 3

CHECKPOINTING = Rung(_NAME, "M7", _offer)
