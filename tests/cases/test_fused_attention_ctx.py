"""The case `fused_attention_ctx`: the twin in pure torch, its residue named, and both cures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

CASE = Path(__file__).parents[2] / "cases" / "fused_attention_ctx"
SCRIPT = CASE / "train.py"
AGAIN = ("--checkpoint-layer", "transformerlayer")
LAYERS, BATCH, TOKENS, WIDTH = 8, 2, 256, 4 * 64
KEPT = LAYERS * 4 * (BATCH * TOKENS * WIDTH + 4)
"""Of each layer q, k, v and the output, a byte an element, and a scale each."""
LOSS = 4


OWN = ("train", "sharded", "upstream_fix", "twin", "twin.layer", "twin.quantized")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; it fixes the order of sums for its process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.syspath_prepend(str(CASE))
    hidden = {name: sys.modules.pop(name) for name in OWN if name in sys.modules}
    yield importlib.import_module("train")
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in OWN:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


def run(
    folder: Path, *arguments: str, watched: bool = False, ranks: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks > 1 else []
    watch = ["-m", "memtriage", "run", "-o", "run", "--json", "report.json"] if watched else []
    done = subprocess.run(
        [sys.executable, *launch, *watch, str(SCRIPT), "--device", "cpu", "--out", "out.json", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (folder / "out.json").exists(), done.stderr
    report = json.loads((folder / "report.json").read_text()) if watched else {}
    return json.loads((folder / "out.json").read_text()), report


def test_residue_is_named_and_both_fixes_clear_it_with_equal_losses(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, report = run(tmp_path, *AGAIN, "--num-iters", "3", watched=True)
    assert plain["stays"] == KEPT + LOSS
    assert report["verdict"] == "residue"
    (finding,) = report["findings"]
    assert "FusedAttnFuncBackward -> ctx.tensor_objects[" in finding["holder"]
    assert finding["bytes"] == KEPT
    kept = {}
    for cure in ("none", "remedy", "patch"):
        out = tmp_path / f"{cure}.json"
        words = [
            "--device",
            "cpu",
            "--num-iters",
            "2",
            "--num-layers",
            "3",
            "--cure",
            cure,
            "--out",
            str(out),
        ]
        monkeypatch.setattr(sys, "argv", ["train.py", *AGAIN, *words])
        module.main()
        kept[cure] = json.loads(out.read_text())
    assert {cure: one["stays"] for cure, one in kept.items()} == {
        "none": KEPT // LAYERS * 3 + LOSS, "remedy": LOSS, "patch": LOSS
    }  # fmt: skip
    assert kept["none"]["losses"] == kept["remedy"]["losses"] == kept["patch"]["losses"]


@pytest.mark.long
def test_under_fsdp_every_rank_keeps_its_own(tmp_path: Path) -> None:
    sharded, _ = run(tmp_path, *AGAIN, "--num-iters", "1", "--num-layers", "2", "--fsdp", "2", ranks=2)
    assert [rank["stays"] for rank in sharded["ranks"]] == [KEPT // LAYERS * 2 + LOSS] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--library", "te"], "--library te needs a CUDA device"),
        (["--layer-type", "groupedlinear"], "is TransformerEngine's: add --library te"),
        (["--checkpoint-layer", "linear"], "is TransformerEngine's: add --library te"),
        (["--profile-memory"], "records the CUDA allocator"),
        (["--fsdp", "1"], "runs under torchrun"),
    ],
)
def test_what_cannot_be_is_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit, match="2"):
        module.arguments()
    assert message in capsys.readouterr().err


def test_the_options_are_those_of_the_issues_script(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (
        "-b 2 -s 64 -n 4 -d 32 -i 7 -k 5 --layer-type multiheadattention --seed 3 --checkpoint-layer "
        "transformerlayer --no-fp8 --no-defer-init --no-te-fsdp --dtype bf16 --profile-name there -v"
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", *given.split()])
    read = vars(module.arguments())
    wanted = {
        "batch_size": 2, "seq_length": 64, "num_heads": 4, "head_dim": 32, "num_iters": 7, "num_layers": 5,
        "layer_type": "multiheadattention", "seed": 3, "checkpoint_layer": "transformerlayer", "no_fp8": True,
        "no_defer_init": True, "no_te_fsdp": True, "dtype": "bf16", "profile_name": "there", "verbose": True,
    }  # fmt: skip
    assert {name: read[name] for name in wanted} == wanted
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cuda"])
    read = vars(module.arguments())
    assert {name: read[name] for name in module.ON_GPU} == module.ON_GPU


def test_the_patch_is_undone_and_says_when_there_is_nothing_to_patch(module: ModuleType) -> None:
    twin, fix = importlib.import_module("twin"), importlib.import_module("upstream_fix")
    function = sys.modules["twin.layer"].FusedAttnFunc
    before, names = vars(function)["backward"], set(vars(sys.modules["twin.layer"]))

    def contexts() -> Any:
        x = torch.randn(8, 2, 32, requires_grad=True)
        layer = twin.MultiheadAttention(2, 16, fp8=True)
        out = layer(x)
        node = out.grad_fn
        while "FusedAttn" not in type(node).__name__:
            node = next(
                one for one, _ in node.next_functions if one is not None and "Accumulate" not in str(one)
            )
        out.sum().backward()
        return node.tensor_objects

    with fix.DropAfterRestore("twin"):
        assert contexts() is None
    assert vars(function)["backward"] is before
    assert set(vars(sys.modules["twin.layer"])) == names
    assert [shell._data is not None for shell in contexts()] == [True] * 4
    with pytest.raises(RuntimeError, match="no autograd function of json"), fix.DropAfterRestore("json"):
        pass


def test_quantized_tensors_survive_saving_and_restoring(module: ModuleType) -> None:
    quantized = importlib.import_module("twin.quantized")
    plain, eight = torch.arange(4.0), quantized.Quantized(torch.arange(6.0))
    parts, shells = quantized.prepare_for_saving(plain, eight, None)
    assert eight._data is None and shells == [None, eight, None]
    assert len(parts) == 4 and parts[0] is plain and parts[3] is None
    assert quantized.restore_from_saved(shells, tuple(parts)) == [plain, eight, None]
    assert torch.allclose(eight.dequantize(), torch.arange(6.0), atol=0.2)
