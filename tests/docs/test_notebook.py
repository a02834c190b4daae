"""The notebook of the examples runs, and shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.documented_files import environment
from support.documents import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


@pytest.mark.slow
def test_the_notebook_finds_its_leak_and_the_cure_is_clean(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples/first_leak.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    notebook.cells.append(nbformat.v4.new_code_cell('print(found["verdict"], fixed["verdict"])'))
    client = nbclient.NotebookClient(notebook, timeout=300)
    client.execute(cwd=str(tmp_path), env=environment(tmp_path) | {"IPYTHONDIR": str(tmp_path)})
    (verdicts,) = notebook.cells[-1].outputs
    assert verdicts.text == "leak clean\n"
    (leak,) = [cell for cell in notebook.cells if cell.id == "leak"]
    assert "history" in str(leak.outputs)
