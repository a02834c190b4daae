"""A run of many steps: stitched from one trace of each shape, it is what tracing every step would give."""

import json
import random

import pytest
import torch
from torch import nn

import memtriage
from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.cli import app
from memtriage.prediction.api import predict_program
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.many_steps.api import horizon_of_program
from memtriage.prediction.many_steps.course import RunCourse
from memtriage.prediction.many_steps.programs import ShapedScript
from memtriage.prediction.many_steps.shapes import TRACED_AT_MOST
from memtriage.prediction.many_steps.step_trace import cut
from memtriage.prediction.script import Script
from memtriage.prediction.simulate import Replay, replay
from memtriage.prediction.trace import BuildFunction, trace

MIB = 1 << 20
WIDTH = 256
WORDS = 1000
VERSION = (2, 13)
LENGTHS = (64, 100, 150, 300, 420)
KEPT_LOSSES = 3


def build(device):
    """A small transformer; it keeps its last losses, and frees its gradients at the next step."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    parts = nn.ModuleDict(
        {
            "in": nn.Embedding(WORDS, WIDTH),
            "mid": nn.TransformerEncoder(layer, 2),
            "out": nn.Linear(WIDTH, WORDS),
        }
    ).to(device)
    optimizer = torch.optim.AdamW(parts.parameters())
    losses = []
    last = [None]

    def step(length):
        optimizer.zero_grad()
        ids = torch.randint(0, WORDS, (4, length), device=device)
        logits = parts["out"](parts["mid"](parts["in"](ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        last[0] = logits.detach()  # of a size that differs from step to step
        losses.append(loss.detach())
        del losses[:-KEPT_LOSSES]

    return parts, optimizer, step


class EveryStep(BuildFunction):
    """The same program with every step traced."""

    def __init__(self, lengths):
        super().__init__(build)
        self.lengths = lengths

    def call(self, built, step):
        return built.step(self.lengths[step])


@pytest.fixture(scope="module")
def whole():
    lengths = random.Random(0).choices(LENGTHS, k=30)
    return lengths, trace(EveryStep(lengths), machine("h200"), VERSION, len(lengths), allocator_conf="")


def steps_of(counters):
    return [(each.peak_allocated, each.peak_reserved) for each in counters]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_stitched_run_reserves_what_tracing_every_step_says(conf, whole):
    lengths, traced = whole
    settings = parse_conf(conf, VERSION)
    truth = steps_of(replay(traced.recording, settings, machine("h200").memory, len(lengths)))
    horizon = memtriage.horizon(build, lengths, allocator_conf=conf, torch_version="2.13")
    assert horizon.peak_reserved == max(reserved for _, reserved in truth)
    assert horizon.peak_step == 1 + [reserved for _, reserved in truth].index(horizon.peak_reserved)
    for point in horizon.course:
        assert (point.peak_allocated, point.peak_reserved) == truth[point.step - 1]
    assert horizon.steps == len(lengths)
    assert horizon.shapes == len(LENGTHS)
    assert horizon.full_at is None
    assert horizon.error is None


def test_step_of_death_is_that_of_tracing_every_step(whole):
    lengths, traced = whole
    memory = machine("h200").memory
    peaks = steps_of(replay(traced.recording, traced.settings, memory, len(lengths)))
    highest = max(allocated for allocated, _ in peaks)
    deaths = set()
    for share in (0.5, 0.8, 0.95, 1.05):
        limit = int(share * highest)
        horizon = memtriage.horizon(build, lengths, limit=limit, torch_version="2.13")
        for steps in range(1, len(lengths) + 1):  # the first number of steps that does not fit
            starts = [*traced.recording.starts(len(lengths)), len(traced.recording.events)]
            if not fits(traced, memory, limit, starts[steps]):
                assert horizon.full_at == steps
                assert horizon.full_shape == str(lengths[steps - 1])
                break
        else:
            assert horizon.full_at is None
        deaths.add(horizon.full_at)
    assert len(deaths) > 1


def fits(traced, memory, limit, end):
    fed = Replay(traced.recording, traced.settings, memory, limit)
    try:
        fed.advance(end)
    except OutOfMemory:
        return False
    return True


def test_known_states_change_no_outcome(whole):
    lengths, traced = whole
    steps = cut(traced.recording, len(lengths))
    later = [step.settled(len(lengths)) for step in steps[KEPT_LOSSES + 2 :]]
    run = [*steps, *later[:2] * 100, *later[:3] * 100]
    oldest = max(step.oldest for step in run)

    def outcomes(**kept):
        course = RunCourse(lambda: Simulator(traced.settings, device_memory=1 << 37), oldest, **kept)
        return list(course.run(run)), course

    plain, simulated = outcomes(most_blocks=-1)
    known, shortened = outcomes()
    assert known == plain
    assert simulated.simulated == simulated.stood_for == shortened.stood_for
    assert shortened.simulated < shortened.stood_for / 2


def test_failing_step_names_what_asked():
    horizon = memtriage.horizon(build, [64] * 5 + [420] * 3, limit=150 * MIB)
    assert horizon.full_at == 6
    assert horizon.full_operator.startswith("aten::")
    assert horizon.full_asked > 0
    assert horizon.memory == 150 * MIB
    capped = next(each for each in horizon.variants if each.name == "no batch larger than 64")
    assert capped.full_at is None


def test_above_32_shapes_a_sample_stands_for_the_others():
    lengths = list(range(40, 225, 5))
    random.Random(1).shuffle(lengths)
    assert len(set(lengths)) > TRACED_AT_MOST
    horizon = memtriage.horizon(build, lengths, torch_version="2.13")
    assert horizon.shapes == len(lengths)
    assert horizon.error < 0.001
    traced = trace(EveryStep(lengths), machine("h200"), VERSION, len(lengths), allocator_conf="")
    truth = steps_of(replay(traced.recording, traced.settings, machine("h200").memory, len(lengths)))
    assert horizon.peak_reserved == max(reserved for _, reserved in truth)


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="limit=0"):
        memtriage.horizon(build, [1], limit=0)


SCRIPT = """
import random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

COUNT, MICRO = int(sys.argv[1]), int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"

class Texts(Dataset):
    def __len__(self):
        return COUNT
    def __getitem__(self, index):
        return torch.zeros(random.Random(index).choice([30, 60, 90, 200]), dtype=torch.int64)

def collate(texts):
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)

torch.manual_seed(0)
loader = DataLoader(Texts(), batch_size=2, shuffle=True, collate_fn=collate, drop_last=True)
model = nn.Sequential(nn.Embedding(100, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 100)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
LENGTHS = []
for epoch in range(1000):
    for number, batch in enumerate(loader):
        ids = batch.to(device)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        if (number + 1) % MICRO == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("micro", [1, 3])
def test_a_scripts_own_loader_gives_the_shapes(micro, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    steps = 40
    arguments = ["250", str(micro)]
    horizon = horizon_of_program(ShapedScript(str(file), arguments, steps=steps), steps).horizon
    every_step = predict_program(Script(str(file), arguments), steps=steps)
    reserved = [step.peak_reserved for step in every_step.steps]
    assert horizon.peak_reserved == max(reserved)
    assert horizon.peak_step == reserved.index(max(reserved)) + 1
    assert horizon.steps == steps
    assert horizon.shapes > 2
    for point in horizon.course:
        assert point.peak_reserved == reserved[point.step - 1]


PLAIN_SCRIPT = """
import torch
from torch import nn
model = nn.Linear(256, 256).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1000):
    model(torch.randn(ROWS, 256).to("cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_script_without_a_loader_must_repeat_itself(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PLAIN_SCRIPT.replace("ROWS", "64"))
    assert horizon_of_program(ShapedScript(str(file), steps=500), 500).horizon.steps == 500
    file.write_text(PLAIN_SCRIPT.replace("ROWS", "64 + number"))
    with pytest.raises(ValueError, match="DataLoader"):
        horizon_of_program(ShapedScript(str(file), steps=500), 500)


def test_command_prints_the_horizon(tmp_path, capfd):
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[16, 16, 64, 32, 16]")
    options = ["--horizon", "20", "--lengths", str(lengths), "--limit", "100MiB", "--json"]
    assert app.main(["predict", f"{__file__}:build", *options]) == 0
    horizon = json.loads(capfd.readouterr().out)["horizon"]
    assert (horizon["steps"], horizon["shapes"], horizon["memory"]) == (20, 3, 100 * MIB)
    assert {"peak_reserved", "peak_step", "full_at", "error"} <= set(horizon)
