"""Entries of the catalogue by the library's functions in recorded stacks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memtriage.catalogue.catalogue import SPECIFIC
from memtriage.snapshots.known import entries_of_stacks, entry_of_stack, known_bytes, known_words

SITE = "/opt/venv/lib/python3.12/site-packages/"
TE = f"{SITE}transformer_engine/pytorch/"


CASES = {
    "te.fp8_workspaces": [f"{TE}module/base.py:1500 in get_weight_workspace"],
    "te.causal_mask": [
        f"{TE}attention/softmax.py:240 in _get_mask",
        f"{TE}attention/softmax.py:250 in _get_default_causal_mask",
    ],
    "te.float8_transpose": [
        f"{TE}tensor/float8_tensor.py:1 in _create_transpose",
        f"{TE}module/base.py:2 in get_weight_workspace",
    ],
    "fsdp2.communication": [
        f"{SITE}torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:330 in foreach_all_gather"
    ],
    "megatron.rotary": [f"{SITE}megatron/core/models/common/embeddings/rotary_pos_embedding.py:9 in forward"],
}
STRANGERS: list[list[str]] = [
    ["/home/me/train.py:12 in get_weight_workspace"],
    [f"{TE}module/linear.py:12 in forward"],
    ["no frame at all"],
    [],
]


@pytest.mark.parametrize(
    ("frames", "name"),
    [*((frames, name) for name, frames in CASES.items()), *((stranger, None) for stranger in STRANGERS)],
)
def test_the_innermost_function_of_a_library_decides(frames: list[str], name: str | None) -> None:
    found = entry_of_stack(frames)
    assert (None if found is None else found.name) == name


def test_stacks_are_known_by_their_number() -> None:
    stacks = [(), ("train.py:1 in f",), (f"{TE}module/base.py:88 in get_dummy_wgrad",)]
    assert {number: one.name for number, one in entries_of_stacks(stacks).items()} == {2: "te.dummy_wgrads"}


def view(*lives: tuple[list[str], int]) -> Any:
    """Blocks, each with a stack of its own, and its size."""
    sizes = np.array([size for _, size in lives])
    return SimpleNamespace(
        stacks=[SimpleNamespace(frames=frames) for frames, _ in lives],
        replayed=SimpleNamespace(stack=np.arange(len(lives))),
        total=lambda mask: int(sizes[mask].sum()),
    )


def test_bytes_of_known_holders_are_summed_and_the_biggest_comes_first() -> None:
    masks, workspaces = CASES["te.causal_mask"], CASES["te.fp8_workspaces"]
    others = (["train.py:1 in f"], 5000)
    recorded = view((masks, 300), (workspaces, 250), others, (workspaces, 250), (masks, 9000))
    known = known_bytes(recorded, np.array([True, True, True, True, False]))
    assert [(entry.name, held) for entry, held in known] == [
        ("te.fp8_workspaces", 500),
        ("te.causal_mask", 300),
    ]
    assert known_words(known) == [
        "known holders among them, by the functions that made them: "
        "te.fp8_workspaces 500 B, te.causal_mask 300 B"
    ]


def test_without_blocks_of_known_holders_nothing_is_said() -> None:
    recorded = view((CASES["te.causal_mask"], 300), (["train.py:1 in f"], 5000))
    assert known_bytes(recorded, np.array([False, True])) == []
    assert known_words([]) == []


def test_sites_are_names_that_a_frame_can_have() -> None:
    for entry in SPECIFIC:
        for site in entry.sites:
            assert site.functions and all(re.fullmatch(r"[a-z_]\w*", name) for name in site.functions)
            assert site.path.endswith(("/", ".py"))
