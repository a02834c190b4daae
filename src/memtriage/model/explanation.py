"""What an error text or a log proves: the result of `memtriage explain`."""

from __future__ import annotations

from typing import Literal

import msgspec

Maths = Literal["same", "rounding", "approximate", "different"]
"""What a change does to the result of training: nothing, other rounding, an approximation, another task."""


Field = int | None | list[dict[str, int | None]]
"""A size in bytes, None for one that the text names but does not have, or one for each process."""

Label = Literal[
    "does_not_fit",
    "fragmentation",
    "other_process_or_outside_allocator",
    "allocator_limit",
    "driver_refused_though_free",
    "system_memory_fallback",
    "absurd_request",
    "private_pools",
    "host_memory_limit",
    "host_alloc_failed",
    "pinned_host",
    "shared_memory_exhausted",
    "not_memory",
    "killed_unproven",
    "library_alloc_failed",
    "eval_or_graph_retention",
    "informational",
    "unknown",
]
"""What a text can prove. `pinned_host` and `eval_or_graph_retention` are only ever possible, never proven:
they need a stack, a step number or a trend."""

Role = Literal["cause", "same", "followed", "context"]
"""What an event is to the first failure: the failure itself, another message about it (a worker that the
kernel killed), something that came after it, or a report of memory."""


class Fix(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One thing to do.

    Attributes:
        playbook: `M1` ... `M21`.
        action: what to do.
        why: why it helps in this case.
        math: what it does to the result of training.
        saves_bytes: what it saves at most, or frees for this process; None where that cannot be computed.
        costs: what it does to speed.
    """

    playbook: str
    action: str
    why: str
    math: Maths
    costs: str
    saves_bytes: int | None = None


class Settle(msgspec.Struct, kw_only=True):
    """The one further fact that would settle the diagnosis.

    Attributes:
        fact: what to find out.
        command: what tells it: a shell command, or Python where it has to run in the program.
    """

    fact: str
    command: str


class LogEvent(msgspec.Struct, kw_only=True):
    """One message of the log, or several alike.

    Attributes:
        family: whose message it is.
        diagnosis: what it proves by itself; None for what others say when a process has died.
        role: what it is to the first failure.
        line: number of its line.
        ranks: who wrote it, where tags tell.
        source: the tag of the first line, in words; None without one.
        device: `cuda:N`, `xpu:N`, `mps`, `cpu` or `host`.
        count: how many such messages there are, from `line` on.
        text: its line, shortened.
    """

    family: str
    diagnosis: Label | None
    role: Role
    line: int
    ranks: list[int] = msgspec.field(default_factory=list)
    source: str | None = None
    device: str | None = None
    count: int = 1
    text: str = ""


class Explanation(msgspec.Struct, kw_only=True):
    """What a text proves of the first failure in it. Sizes in bytes.

    Attributes:
        schema: version of this form.
        diagnosis: the label.
        confidence: how sure it is, from 0 to 1, that `diagnosis` is what the text proves; for `unknown` and
            `killed_unproven`, that it proves no more than that. 0.95 where the text says it in words or its
            figures leave nothing else, 0.65 where one other answer cannot be ruled out, 0.5 where two; a
            fifth less where figures are cut off; 0.3 where a line speaks of memory in no known form.
        also_possible: answers that the text cannot rule out, the likelier first.
        fields: the sizes as the message names them.
        evidence: what the diagnosis rests on, one sentence or sum each.
        fixes: what can help this case, in order of cost.
        settle: the further fact that would settle it; None where nothing is open.
        stale_advice: why the message's own advice does not help; None where it has none, or may be right.
        events: every memory event of the text in order, the first failure having the role `cause`.
    """

    schema: int = 1
    diagnosis: Label
    confidence: float
    also_possible: list[Label] = msgspec.field(default_factory=list)
    fields: dict[str, Field] = msgspec.field(default_factory=dict)
    evidence: list[str] = msgspec.field(default_factory=list)
    fixes: list[Fix] = msgspec.field(default_factory=list)
    settle: Settle | None = None
    stale_advice: str | None = None
    events: list[LogEvent] = msgspec.field(default_factory=list)
