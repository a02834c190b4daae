"""Jobs of four ranks: a rank's bytes in a prediction against those of real ranks over gloo on the CPU."""

import json
import os
import socket
import subprocess
import sys

import pytest

import memtriage
from support import meshes


@pytest.fixture(scope="module")
def real():
    """What each rank of the real jobs keeps, and most of it at once, by job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, meshes.__file__, str(rank), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(meshes.RANKS)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * meshes.RANKS
    return [json.loads(text) for text in outputs]


@pytest.mark.parametrize("names", meshes.JOBS, ids="+".join)
@pytest.mark.parametrize("rank", [0, meshes.RANKS - 1])
def test_a_predicted_rank_has_as_much_at_once_as_a_real_one_and_keeps_the_same(real, names, rank):
    sizes = {}
    prediction = memtriage.predict(
        meshes.build_for(names, sizes), gpu="h100", world_size=meshes.RANKS, rank=rank
    )
    assert sizes == real[rank]["+".join(names)]
    for owner, kind in (("parameter", "parameters"), ("optimizer state", "states")):
        rounded = prediction.by_owner[owner]
        assert sizes[kind] <= rounded < sizes[kind] * 1.05, "the allocator rounds each to 512 bytes"
