"""DeepSpeed's ZeRO: a rank's bytes in a prediction against those of real ranks over gloo on the CPU."""

import json
from pathlib import Path

import pytest

from support import zero_jobs
from support.real_deepspeed import free_port, installed, output, results, start

pytestmark = pytest.mark.skipif(not installed(), reason="needs deepspeed")
PARAMETERS = sum(parameter.numel() for _ in range(3) for parameter in zero_jobs.layers().parameters())
WEIGHT = {"bfloat16": 2, "float32": 4}


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_predicted_ranks_have_as_much_at_once_as_real_ones_and_keep_the_same(ranks):
    file, size = zero_jobs.__file__, str(ranks)
    port = str(free_port())
    started = [start("cpu", file, str(rank), size, port) for rank in range(ranks)]
    real = {}
    for process in started:
        real |= results(process)[0]
    command = ("-m", "memtriage", "predict", f"{file}:build", "--world-size", size, "--all-ranks")
    predicted = {}
    for printed in results(start(None, *command, "--gpu", "h100", "--steps", "1", "--show-output")):
        predicted |= printed
    assert predicted == {rank: real[rank] for rank in predicted}
    assert {"0", str(ranks - 1)} <= predicted.keys()
    for name, sizes in predicted["0"].items():
        # As DeepSpeed documents its stages: Adam has master weights and two states, all in fp32.
        weight = next(size for dtype, size in WEIGHT.items() if dtype in name)
        shares = ranks if "ZeRO-3" in name else 1
        assert sizes["parameters"] * shares == weight * PARAMETERS, name
        assert sizes["masters"] * ranks == 4 * PARAMETERS, name
        assert sizes["states"] * ranks == 8 * PARAMETERS, name


@pytest.mark.parametrize(
    ("layers", "name"),
    [(17, "DeepSpeed pinned, 285M"), pytest.param(60, "DeepSpeed pinned, 1B", marks=pytest.mark.long)],
)
def test_the_host_of_an_offloaded_optimizer_is_as_measured(layers, name):
    """The unchanged script of the case, with DeepSpeed's Adam on the host, next to what its H200 measured."""
    case = Path(__file__).parents[3] / "cases" / "deepspeed_zero2_offload"
    [measured] = json.loads((case / "results" / "h200.json").read_text())["jobs"][name]
    options = ("--host", "--json", "--world-size", "1")
    script = (str(case / "train.py"), "--", "--layers", str(layers))
    text = output(start(None, "-m", "memtriage", "predict", *options, *script))
    host = json.loads(text[text.index('{"schema"') :].splitlines()[0])["host"]
    parameters = measured["parameters"]
    assert host["optimizer state"] == 12 * parameters
    assert host["gradient"] == 4 * parameters
    assert host["pinned"] == pytest.approx(measured["rows"]["pinned rounding and cached"], rel=0.01)
    assert host["peak"] - host["libraries"] == pytest.approx(measured["peak"]["step 4"], rel=0.01)
