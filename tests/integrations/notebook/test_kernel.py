"""A real notebook, run by a real kernel: what its cells show, and what is in their results."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from support.cell_reports import Balanced

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

OOM = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB in all')"
KEEPING = """
    def work(error):
        activations = [torch.zeros(1 << 18)]
        refs.append(weakref.ref(activations[0]))
        raise error
"""
GROWING = """
    %%memtriage
    kept.append(torch.zeros(1 << 18))
    model = torch.nn.Linear(1024, 1024)
    len(kept)
"""
TRAINING = """
    %%memtriage --json told
    import asyncio
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(20):
        layer(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(torch.zeros(1 << 16))
        await asyncio.sleep(0)
"""
CELLS = {
    "load": "%load_ext memtriage\nimport json, sys, weakref\nimport torch",
    "functions": KEEPING,
    "lists": "kept, refs = [], []",
    "run": GROWING,
    "training": TRAINING,
    "training told": "print(json.dumps(told))",
    "oom": f"%%memtriage --json told\nwork({OOM})",
    "oom told": "print(json.dumps([refs[-1]() is None, hasattr(sys, 'last_traceback'), told]))",
    "error": "work(KeyError('its own'))",
    "shown": "x = torch.ones(1 << 18)\ntorch.ones(1 << 18)",
    "shown too": "x",
    "now": "%memtriage --json now",
    "now told": "print(json.dumps(now))",
    "free": "%memtriage_free --out --json freed",
    "free told": "print(json.dumps([refs[-1]() is None, x.numel(), freed]))",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell of the notebook, which is a file that was read."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(text).strip()) for text in CELLS.values()]
    path = folder / "demo.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "MEMTRIAGE_DIR"):
        environment.pop(name, None)
    client = nbclient.NotebookClient(notebook, timeout=120, allow_errors=True)
    client.execute(cwd=str(folder), env=environment)
    assert list(Path(folder).glob("memtriage*")) == []
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def printed(outputs: dict[str, list[Any]], cell: str) -> Any:
    (output,) = outputs[cell]
    return json.loads(output.text)


def shown(outputs: dict[str, list[Any]], cell: str) -> Any:
    """What the magic shows: the cell's last output."""
    output = outputs[cell][-1]
    assert output.output_type == "display_data"
    return output.data


def text_of(html: str) -> str:
    return Balanced(html).text


def test_the_cells_value_comes_before_the_report_in_both_forms(outputs: dict[str, list[Any]]) -> None:
    value, report = outputs["run"]
    assert value.data["text/plain"] == "1"
    assert set(report.data) == {"text/html", "text/plain"}
    for text in (report.data["text/plain"], text_of(report.data["text/html"])):
        words = " ".join(text.split())
        assert "\x1b" not in words
        assert "tensors +5.0 MiB on cpu" in words
        assert "kept[*]" in words


def test_a_leak_inside_a_cell_that_awaits_is_found_with_its_line(outputs: dict[str, list[Any]]) -> None:
    told = printed(outputs, "training told")
    assert (told["verdict"], told["steps"]) == ("leak", 20)
    (finding,) = [finding for finding in told["findings"] if finding["kind"] == "leak"]
    assert finding["holder"] == "kept[*]"
    assert 0 <= finding["bytes_per_step"] - (4 << 16) <= 1024  # and a tensor object of its own
    assert finding["allocated_at"].partition(" in ")[0] == f"{told['cell']['label']}:9"
    assert "256.5 KiB per step" in text_of(shown(outputs, "training")["text/html"])


def test_an_out_of_memory_error_frees_its_traceback(outputs: dict[str, list[Any]]) -> None:
    error, report = outputs["oom"]
    assert error.output_type == "error"
    assert any("activations = [" in line for line in error.traceback)  # shown before it was freed
    gone, kept, told = printed(outputs, "oom told")
    assert (gone, kept) == (True, False)
    assert told["verdict"] == "out_of_memory"
    assert told["cell"]["freed"]["bytes"] == {"cpu": 1 << 20}
    holder = told["cell"]["freed"]["holders"][0]["holder"]
    assert holder == "last traceback -> frame work(): activations[*]"
    assert told["cell"]["traceback"] == {}
    assert any(holder["holder"] == "model.weight" for holder in told["cell"]["holders"])
    for form in report.data.values():
        assert "freed 1.0 MiB on cpu" in form


def test_what_holds_memory_now(outputs: dict[str, list[Any]]) -> None:
    now = printed(outputs, "now told")
    assert now["traceback"] == {"cpu": 1 << 20}
    assert now["outputs"] == {"cpu": 1 << 20}
    holders = {holder["holder"]: holder["bytes"] for holder in now["holders"]}
    assert holders["x"] == 1 << 20
    assert holders["Out[*]"] == 1 << 20
    assert holders["model.weight"] == 4 << 20
    (ledger,) = [ledger for ledger in now["ledgers"] if ledger["device"] == "host"]
    assert sum(row["bytes"] for row in ledger["rows"]) == ledger["total"]
    for text in (shown(outputs, "now")["text/plain"], text_of(shown(outputs, "now")["text/html"])):
        assert "model.weight" in text
        assert "alone keeps 1.0 MiB on cpu" in " ".join(text.split())


def test_freeing_takes_the_traceback_and_what_only_outputs_hold(outputs: dict[str, list[Any]]) -> None:
    gone, elements, told = printed(outputs, "free told")
    assert gone
    assert elements == 1 << 18
    assert told["freed"]["bytes"] == {"cpu": 2 << 20}
