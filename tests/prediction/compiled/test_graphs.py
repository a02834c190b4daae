"""Trees of CUDA graphs: programs are warmed up, recorded and replayed as on a GPU."""

import importlib.util

import pytest
import torch

import memtriage
from memtriage.allocator.settings import parse_version
from memtriage.model.units import MIB
from memtriage.prediction.compiled import trials
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, SHARED_POOL
from memtriage.prediction.trace import trace
from support import groundtruth

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Inductor needs Triton to compile for GPUs"
)

ROWS, WIDTH = 2048, 1024
BATCH = ROWS * WIDTH * 4
MEASURED_WITH = "2.11"
BATCH_KEPT = 8 * MIB + MIB
"""Other versions keep a batch longer or shorter, and make the workspace of cuBLASLt otherwise."""
SEGMENT = 20 * MIB


@pytest.mark.parametrize("name", groundtruth.names("graph_programs"))
def test_each_step_of_a_program_is_as_on_a_gpu(name):
    """Exact with the torch that measured them; with others but for what Inductor itself does otherwise."""
    measured = groundtruth.measured("graph_programs")[name]["steps"]
    prediction = memtriage.predict(groundtruth.workload(name), steps=len(measured), gpu="h100")
    exact = torch.__version__.startswith(MEASURED_WITH)
    for predicted, truth in zip(prediction.steps, measured, strict=True):
        for counter, known, missed in (
            ("peak_allocated", "peak_alloc", BATCH_KEPT),
            ("peak_reserved", "peak_reserved", SEGMENT),
            ("end_allocated", "end_alloc", 0),
        ):
            assert getattr(predicted, counter) == pytest.approx(
                truth[known], abs=0 if exact else missed, rel=0
            )


def build(device, mode="reduce-overhead", batches=1, marks=False):
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    optimizer = torch.optim.SGD([weight])
    compiled = torch.compile(lambda values: (values @ weight).sin(), mode=mode, dynamic=False)

    def step():
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        for _ in range(batches):
            compiled(torch.randn(ROWS, WIDTH, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch.nn.ParameterList([weight]), optimizer, step


def test_a_replay_allocates_nothing_and_keeps_the_pool():
    warm, recorded, *replayed = memtriage.predict(build, steps=4).steps
    assert min(warm.peak_allocated, recorded.peak_allocated) > 4 * BATCH
    for step in replayed:
        assert step.peak_allocated < 4 * BATCH
        assert step.peak_reserved > recorded.peak_reserved - SEGMENT
        assert step.end_allocated == recorded.end_allocated


def in_pool(recording, step):
    """Sizes of what is allocated in private pools in one of two steps, without trials of kernels."""
    starts = [*recording.starts(2), len(recording.events)]
    return [
        event.size
        for event in recording.events[starts[step] : starts[step + 1]]
        if event.size != FREE
        and recording.blocks[event.block].pool != SHARED_POOL
        and recording.blocks[event.block].op != trials.OPERATOR
    ]


def test_a_batch_and_the_gradient_of_the_result_are_copied_into_the_pool():
    """A graph reads what changes its place from a copy of its own; a warm-up reads it where it is."""
    recording = trace(build, machine("h200"), parse_version(None), 2).recording
    warm, recorded = (in_pool(recording, step) for step in range(2))
    assert recorded.count(BATCH) == warm.count(BATCH) + 2


def test_gradients_that_a_second_batch_overwrites_are_refused_as_on_a_gpu():
    with pytest.raises(ValueError, match=r"overwritten by a subsequent run.*on a GPU as well"):
        memtriage.predict(lambda device: build(device, batches=2))
    assert memtriage.predict(lambda device: build(device, batches=2, marks=True)).peak_allocated


def test_a_captured_graph_outside_of_trees_is_refused():
    def capturing(device):
        model, optimizer, step = build(device)

        def capture():
            step()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                step()

        return model, optimizer, capture

    with pytest.raises(ValueError, match="CUDA graphs cannot be traced"):
        memtriage.predict(capturing)


def test_annotations_can_name_the_class_of_graphs():
    def annotating(device):
        made = build(device)
        made[2]()  # compiles
        assert torch.cuda.CUDAGraph | None  # as Python evaluates an annotation
        return made

    assert memtriage.predict(annotating, steps=1).peak_allocated


def test_the_steps_of_a_long_run_are_refused():
    with pytest.raises(ValueError, match="many steps with CUDA graphs"):
        memtriage.horizon(build, steps=8)
