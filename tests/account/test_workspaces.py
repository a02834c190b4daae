"""Which blocks are the workspaces of cuBLAS: by their sizes, and by how many there are."""

from __future__ import annotations

import pytest

from memtriage.account.workspaces import WorkspaceSizes, cublas_blocks, workspace_sizes
from memtriage.model.blocks import Block, Segment

KIB, MIB = 1 << 10, 1 << 20
SMALL = 8_519_680
"""Before Hopper: 2 of 4096 KiB and 8 of 16."""


@pytest.mark.parametrize(
    ("config", "lt_config", "cublas", "cublaslt"),
    [
        (None, None, {32 * MIB, SMALL}, {MIB}),
        ("", "", {32 * MIB, SMALL}, {MIB}),
        (":4096:2:16:8", None, {SMALL}, {MIB}),
        (":16:8", "64", {128 * KIB}, {64 * KIB}),
        (":4096:0", "0", set(), set()),
        ("none", "64 KiB", {32 * MIB, SMALL}, {MIB}),
    ],
)
def test_sizes_are_those_of_the_environment(
    config: str | None, lt_config: str | None, cublas: set[int], cublaslt: set[int]
) -> None:
    assert workspace_sizes(config, lt_config) == WorkspaceSizes(frozenset(cublas), frozenset(cublaslt))


def found(*blocks: tuple[int, int, int]) -> list[int]:
    """Places of the workspaces among blocks of (bytes, stream, pool)."""
    made = []
    for place, (nbytes, stream, pool) in enumerate(blocks):
        block = Block(address=place, size=nbytes, requested=nbytes, state="active")
        segment = Segment(
            device=0, address=0, size=1, stream=stream, pool=(0, pool), expandable=False, blocks=(block,)
        )
        made.append((segment, block))
    return sorted(cublas_blocks(made, workspace_sizes()))


BIG, LT = 32 * MIB, MIB


@pytest.mark.parametrize(
    ("blocks", "workspaces"),
    [
        pytest.param([(BIG, 0, 0), (5, 0, 0), (SMALL, 0, 0)], [0, 2], id="of two sizes"),
        pytest.param([(BIG, 0, 0)] * 2, [0, 1], id="of two threads"),
        pytest.param([(BIG, 0, 0)] * 3, [], id="more than there are threads"),
        pytest.param([(BIG, 0, 0), (BIG, 0, 0), (BIG, 7, 0)], [0, 1, 2], id="of two streams"),
        pytest.param([(BIG, 0, 0), (BIG, 0, 0), (BIG, 0, 2)], [0, 1, 2], id="of two pools"),
        pytest.param([(LT, 0, 0)], [], id="a small one alone"),
        pytest.param([(LT, 0, 0), (BIG, 0, 0)], [0, 1], id="a small one with a large one"),
        pytest.param([(LT, 7, 0), (BIG, 0, 0)], [1], id="of another stream"),
        pytest.param([(LT, 0, 2), (BIG, 0, 0)], [1], id="of another pool"),
        pytest.param([(LT, 0, 0), *[(BIG, 0, 0)] * 3], [], id="large ones that are too many"),
        pytest.param([*[(LT, 0, 0)] * 3, (BIG, 0, 0)], [3], id="small ones that are too many"),
    ],
)
def test_workspaces_have_their_size_and_are_few(
    blocks: list[tuple[int, int, int]], workspaces: list[int]
) -> None:
    assert found(*blocks) == workspaces
