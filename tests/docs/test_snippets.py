"""The documentation's Python compiles, names only what memtriage has, and runs where a CPU is enough."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import memtriage
from support import documents
from support.documented_files import Files, environment
from support.documents import Block

SNIPPETS: Final = documents.ROOT / "tests/support/documented_snippets.py"
BLOCKS: Final = [
    block for page in documents.pages() for block in documents.blocks(page) if block.language == "python"
]
NOT_RUN: Final = {
    "deepspeed_exact_host_memory": "needs DeepSpeed: tests/treat/deepspeed",
    "remedy": "needs DeepSpeed and its engine: tests/treat/deepspeed",
    "Trainer(": "stands for the reader's own training: tests/integrations trains with the real libraries",
    "_record_memory_history": "needs CUDA",
    "fully_shard(": "needs a process group, which predict makes: tests/prediction",
    "send_weights()": "needs the GPU's memory to move: tests/treat/parking",
    "MeterProvider([": "takes the reader's own exporters: tests/integrations/test_metrics.py",
    "te_restore": "needs TransformerEngine: tests/treat",
}
"""What a block has that keeps it from running, and who runs the like."""


def _id(block: Block) -> str:
    return f"{block.page}:{block.line}"


def _not_run(block: Block) -> str | None:
    return next((why for text, why in NOT_RUN.items() if text in block.text), None)


RUN: Final = [block for block in BLOCKS if _not_run(block) is None]


@pytest.mark.parametrize("block", BLOCKS, ids=_id)
def test_it_compiles_and_what_it_names_exists(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "memtriage"
        ):
            assert hasattr(memtriage, node.attr), f"there is no memtriage.{node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memtriage":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                there = hasattr(module, name.name)
                assert there or importlib.import_module(f"{node.module}.{name.name}")


def test_cells_of_notebooks_can_be_read() -> None:
    cells = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    pages = [block for page in documents.pages() for block in documents.blocks(page)]
    shown = [block for block in pages if block.language == "ipython"]
    assert shown
    for block in shown:
        ast.parse(cells.transform_cell(block.text))


@pytest.mark.parametrize("name", [name for name in memtriage.__all__ if not name.startswith("_")])
def test_every_public_name_is_described(name: str) -> None:
    if name.endswith("_ipython_extension"):  # what IPython calls
        return
    page = (documents.ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert re.search(rf"^::: memtriage\.{name}$", page, re.MULTILINE)


def test_what_a_cpu_can_run_runs(tmp_path: Path) -> None:
    """All in one process, because torch takes longer to import than most of them to run."""
    (tmp_path / "kept").mkdir()
    Files(tmp_path / "kept").bring(tmp_path, "run.pickle")
    done = subprocess.run(
        [sys.executable, SNIPPETS, str(tmp_path)],
        input=json.dumps([(block.page, block.line, block.text) for block in RUN]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == len(RUN)
    assert not any(outcomes), "\n".join(filter(None, outcomes))


@pytest.mark.parametrize("text", NOT_RUN)
def test_no_exception_is_left_over(text: str) -> None:
    assert any(text in block.text for block in BLOCKS)
