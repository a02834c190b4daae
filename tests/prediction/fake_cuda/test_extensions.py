"""Packages whose compiled part is not installed."""

import importlib
import sys

import pytest
import torch

import memtriage
from memtriage.prediction.build import load
from memtriage.prediction.fake_cuda.extensions import compiled_parts_optional

PROGRAM = """
import flash_attn_2_cuda
import torch

BATCH, LENGTH, HEADS, SIZE, KEY_HEADS = 2, 300, 4, 64, 2


def _forward(q, k, v):
    return torch.empty_like(q)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=(), device_types="cuda")
def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attn_2_cuda.bwd(dout, q, k, v)


@backward.register_fake
def _(dout, q, k, v):
    return q.new_empty(BATCH, HEADS, 384, dtype=torch.float32)


def build(device):
    queries = torch.nn.Parameter(torch.randn(BATCH, LENGTH, HEADS, SIZE, dtype=torch.bfloat16, device=device))
    keys = torch.randn(BATCH, LENGTH, KEY_HEADS, SIZE, dtype=torch.bfloat16, device=device)

    def step():
        with torch.no_grad():
            backward(queries, queries, keys, keys)

    return torch.nn.ParameterList([queries]), torch.optim.SGD([queries]), step
"""


def test_a_package_is_traced_without_its_compiled_part(tmp_path):
    if importlib.util.find_spec("flash_attn_2_cuda") is not None:
        pytest.skip("the compiled part is installed")
    file = tmp_path / "attention_program.py"
    file.write_text(PROGRAM)
    prediction = memtriage.predict(load(f"{file}:build"))
    given = 2 * 300 * (4 + 2) * 64 * 2
    sums = 2 * 4 * 384 * 4
    gradient_of_queries = 2 * 4 * 384 * 64 * 4
    expanded_keys = 2 * (2 * 300 * 4 * 64 * 2)
    assert prediction.peak_allocated == pytest.approx(
        given + sums + gradient_of_queries + expanded_keys, abs=6 * 512
    )


def test_a_missing_compiled_part_is_found_in_the_block_alone():
    with compiled_parts_optional():
        part = importlib.import_module("flash_attn_2_cuda")
        with pytest.raises(NotImplementedError, match="not installed"):
            part.fwd(torch.empty(1))
    assert "flash_attn_2_cuda" not in sys.modules
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn_2_cuda")


@pytest.fixture
def builders(tmp_path, monkeypatch):
    """Where DeepSpeed keeps what it has compiled, importable and not imported yet."""
    folder = tmp_path
    for name in ("deepspeed", "ops", "op_builder"):
        folder = folder / name
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / "builder.py").write_text("class OpBuilder:\n    _loaded_ops = {'fused_adam': 'compiled'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    yield lambda: importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.mark.parametrize("before", [True, False])
def test_optimizers_that_deepspeed_compiles_do_nothing_in_the_block_alone(builders, before):
    if before:
        builders()
    with compiled_parts_optional():
        loaded = builders()
        assert loaded["fused_adam"].multi_tensor_adam(65536, None, [[]], 1e-4) == 0
        assert loaded["cpu_adam"].adam_update(0, 1, 1e-4) == 0
    assert loaded == {"fused_adam": "compiled"}
