"""What rules ask of one recorded device: its lives by owner, phase, age, site and stack."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memtriage.catalogue.catalogue import SPECIFIC
from memtriage.model.recording import NO_FRAMES
from memtriage.model.units import MIB
from memtriage.snapshots import read as read_module
from memtriage.snapshots.steps import PHASES
from memtriage.snapshots.view import (
    DeviceView,
    entry_of_stack,
    known_bytes,
    known_site,
    known_words,
    listed,
    way_to,
)
from support.raw_snapshot import Program, forward, frame, optimizer, recording_of, snapshot_of, user

Viewed = Callable[[Program], DeviceView]


@pytest.fixture
def viewed(monkeypatch: pytest.MonkeyPatch) -> Viewed:
    """The device of a program, as the rules get it."""

    def view_of(program: Program) -> DeviceView:
        views: list[DeviceView] = []
        monkeypatch.setattr(read_module, "judge", lambda view, *_: views.append(view) or [])
        recording_of(snapshot_of(program))
        (view,) = views
        return view

    return view_of


def training() -> Program:
    """Three steps with activations, states that stay, and 3 MiB more at each step."""
    program = Program()
    program.alloc(5 * MIB, user(3, "load"))
    for _ in range(3):
        program.free([program.alloc(8 * MIB, forward(30)), program.alloc(4 * MIB, forward(31))])
        program.alloc(3 * MIB, user(7))
        program.alloc(2 * MIB, optimizer(41))
        program.step_span()
    return program


def test_lives_by_site_are_summed_biggest_first(viewed: Viewed) -> None:
    view = viewed(training())
    everything = np.ones(len(view.replayed.size), bool)
    assert view.total(everything) == (5 + 3 * (8 + 4 + 3 + 2) + 1) * MIB  # one block is not split
    assert view.total(view.alive()) == (5 + 3 * (3 + 2)) * MIB
    rows = view.by_site(everything)
    assert [(total // MIB, count) for _, total, count in rows] == [(24, 3), (13, 3), (9, 3), (6, 3), (5, 1)]
    assert view.by_site(~everything) == []
    assert listed(rows, 2) == (
        "train.py:30 in forward (24.0 MiB in 3 blocks), train.py:31 in forward (13.0 MiB in 3 blocks), "
        "3 more (20.0 MiB)"
    )
    first = view.sites.names.index(rows[0][0])
    assert view.total(view.at_sites([first])) == 24 * MIB
    assert view.total(view.at_sites([])) == 0
    assert int(view.at_sites([first, view.sites.names.index(rows[4][0])]).sum()) == 4


def test_sites_of_the_same_size_come_by_name(viewed: Viewed) -> None:
    program = Program()
    program.alloc(MIB, user(9, "b"))
    program.alloc(MIB, user(9, "a"))
    view = viewed(program)
    assert [site for site, _, _ in view.by_site(view.alive())] == sorted(
        site for site, _, _ in view.by_site(view.alive())
    )


def test_phases_and_owners_of_lives(viewed: Viewed) -> None:
    view = viewed(training())
    phases = [PHASES[code] for code in view.phases()]
    assert phases.count("forward") == 6
    assert phases.count("optimizer") == 3
    assert view.total(view.owned_by("optimizer state")) == 6 * MIB
    assert view.total(view.owned_by("forward temporary", "optimizer state")) == (37 + 6) * MIB
    assert not view.owned_by().any()


def test_how_many_step_ends_a_life_sees(viewed: Viewed) -> None:
    view = viewed(training())
    survived = dict(zip(*np.unique(view.survived(), return_counts=True), strict=True))
    assert survived == {0: 6, 1: 2, 2: 2, 3: 3}


def test_the_way_to_most_of_some_lives_is_the_program_s_own(viewed: Viewed) -> None:
    program = Program()
    own = [frame("/home/user/model.py", 7, "block"), frame("/home/user/train.py", 3, "main")]
    library = frame("/usr/lib/python3/site-packages/torch/nn/modules/linear.py", 125, "forward")
    program.alloc(8 * MIB, [library, own[0], library, own[1]])
    program.alloc(5 * MIB, [library, own[1]])
    program.alloc(6 * MIB, [library, own[1]])
    view = viewed(program)
    sizes = view.replayed.size
    assert way_to(view, sizes == 8 * MIB) == "model.py:7 in block < train.py:3 in main"
    assert way_to(view, sizes < 8 * MIB) is None  # one frame is no way
    assert way_to(view, sizes > 0) is None  # 11 MiB came the other way
    assert way_to(view, sizes == 0) is None


def test_a_life_without_frames_has_no_site() -> None:
    assert known_site(NO_FRAMES) is None
    assert known_site("train.py:17 in forward") == "train.py:17 in forward"


ROWS = [(f"train.py:{line}", (9 - line) * MIB, line) for line in range(1, 8)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ""),
        (ROWS[:1], "train.py:1 (8.0 MiB in 1 block)"),
        (ROWS[:2], "train.py:1 (8.0 MiB in 1 block), train.py:2 (7.0 MiB in 2 blocks)"),
        (
            ROWS,
            "train.py:1 (8.0 MiB in 1 block), train.py:2 (7.0 MiB in 2 blocks), "
            "train.py:3 (6.0 MiB in 3 blocks), train.py:4 (5.0 MiB in 4 blocks), "
            "train.py:5 (4.0 MiB in 5 blocks), 2 more (5.0 MiB)",
        ),
    ],
)
def test_sites_in_words(rows: list[tuple[str, int, int]], words: str) -> None:
    assert listed(rows) == words


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
