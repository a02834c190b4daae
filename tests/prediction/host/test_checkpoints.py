"""Distributed checkpoints of one rank, and work that is given to threads."""

from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

COUNT = 1 << 15


def saved(device):
    weight = nn.Parameter(torch.empty(COUNT))
    dcp.save({"weight": weight, "step": 3}, checkpoint_id="saved")
    state = {"weight": nn.Parameter(torch.empty(COUNT)), "step": 0}
    dcp.load(state, checkpoint_id="saved")
    return state["step"], tuple(state["weight"].shape)


def large(story):
    """What is allocated and freed of at least a tensor, in order."""
    return [line.removesuffix(" heap") for line in story if int(line[1:].split()[0]) >= 4 * (COUNT - 1)]


def test_a_checkpoint_is_written_by_one_rank_alone(host_story):
    answer, story, _ = host_story(saved)
    assert answer == (3, (COUNT,))
    (written,) = [line for line in story if line[0] == "+" and "copies for saving" in line]
    assert written.endswith(" mapping")
    size = 4 * COUNT
    assert large(story) == [f"+{size} loaded", f"+{size} parameter", f"-{size} loaded", f"-{size} parameter"]
    answer, *_ = host_story(saved, gpu="h200", world_size=2, rank=1)  # its own part
    assert answer == (3, (COUNT,))


def test_an_asynchronous_checkpoint_keeps_a_copy_until_it_is_waited_for(host_story):
    def run(device):
        weight = nn.Parameter(torch.empty(COUNT, device=device))
        state = {"weight": weight, "same": weight[1:], "step": torch.tensor(3)}
        done = dcp.async_save(state, checkpoint_id="saved")
        del state
        kept = torch.ones(COUNT)
        del kept
        done.result()

    _, story, _ = host_story(run, gpu="h200")
    whole, part = 4 * COUNT, 4 * (COUNT - 1)
    assert large(story) == [
        f"+{whole} copies for saving", f"+{part} other tensors", f"-{part} other tensors",
        f"+{whole} other tensors", f"-{whole} other tensors", f"-{whole} copies for saving",
    ]  # fmt: skip


def test_work_of_others_is_given_to_threads(host_story):
    def run(device):
        def fails():
            raise KeyError("lost")

        fails.__module__ = "torch.distributed.checkpoint.own"
        own = lambda number: (get_ident(), number)  # noqa: E731
        traced = lambda number: (get_ident(), number)  # noqa: E731
        traced.__module__ = "transformers.saving"
        own.__module__ = None
        with ThreadPoolExecutor(1) as pool:
            there, here, failed = pool.submit(own, 1), pool.submit(traced, 2), pool.submit(fails)
            threads = there.result()[0] != get_ident(), here.result()[0] == get_ident()
        return threads, (there.result()[1], here.result(timeout=1)[1]), str(failed.exception())

    answer, *_ = host_story(run)
    assert answer == ((True, True), (1, 2), "'lost'")
