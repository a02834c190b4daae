"""What the stages of a pipeline ask each other, where there is one stage alone."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from support.traced import traced


def test_an_object_of_another_process_is_refused_with_advice():
    def run(device):
        dist.recv_object_list([None], 0)

    with pytest.raises(
        ValueError, match=r"one process receives a Python object from another.*input_args and"
    ):
        traced(run, world_size=2)


@pytest.mark.skipif(not hasattr(PipelineStage, "_warmup_forward_vote"), reason="stages vote since torch 2.13")
@pytest.mark.parametrize("given", [True, False])
def test_a_stage_votes_alone(given):
    def run(device):
        layer, rows = torch.nn.Linear(4, 4).to(device), torch.empty(2, 4, device=device)
        shapes = {"input_args": (rows,), "output_args": (rows,)} if given else {}
        stage = PipelineStage(layer, 0, 2, device, **shapes)
        return [vote.item() for vote in (stage._warmup_forward_vote(), stage._warmup_backward_result())]

    assert traced(run, world_size=2).answer == [int(given)] * 2
