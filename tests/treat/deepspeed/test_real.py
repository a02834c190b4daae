"""The remedy with DeepSpeed itself, on the CPU. `make test` installs it in a folder of its own, if it can."""

from __future__ import annotations

import pytest

from support.real_deepspeed import installed, run

WIDTH = 1024
NOISE = 3 << 20

pytestmark = pytest.mark.skipif(not installed(), reason="needs deepspeed")
SHARED = {"two micro-batches": {False}, "shared sums": {True}}
"""Where sums of micro-batches are, and whether they are in the fp32 gradients."""


def test_the_bits_are_those_of_deepspeed_alone() -> None:
    for way, found in run("cpu", "bits").items():
        assert found["with"] == found["without"], way
        assert found["longer with"] == found["longer without"], way
        assert found["loaded and undone"] == found["longer without"], way
        assert found["longer with"] != found["with"], way
        assert found["during"] == ["Streamed", "Streamed"], way
        assert found["after"] == ["Tensor", "Tensor"], way
        assert set(found["shared"]) == SHARED.get(way, set()), way
        assert not any(found["shared after"]), way


def test_staging_copy_and_unused_buffer_leave_the_resident_set() -> None:
    without, with_remedy = run("cpu", "bytes", str(WIDTH), "none"), run("cpu", "bytes", str(WIDTH), "remedy")
    saved = 2 * with_remedy["parameters"] + 2 * WIDTH * WIDTH
    for when in ("made", "stepped"):
        assert abs(without[when] - with_remedy[when] - saved) <= NOISE
