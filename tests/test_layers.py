"""The layout of `src/memtriage`: one road, no circle, no arrow up. `tests/support/layers.py` has the road."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict

import pytest

import memtriage
from support import layers


def test_every_folder_stands_on_the_road() -> None:
    folders = {path.name for path in layers.PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(layers.FOLDERS)


def test_a_folder_imports_only_from_those_before_it() -> None:
    assert layers.arrows_up() == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert layers.circles(layers.imports()) == []


@pytest.mark.parametrize(
    "folder", ["", *(name for name, path in layers.modules().items() if name and path.name == "__init__.py")]
)
def test_no_neighboring_folders_import_each_other_in_a_circle(folder: str) -> None:
    assert layers.circles(layers.folder_graph(folder)) == []


def test_circles_and_arrows_up_are_found() -> None:
    assert layers.circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [["b", "c"]]
    assert layers.LEVEL["model"] < layers.LEVEL["observe"] < layers.LEVEL["session"] < layers.LEVEL["cli"]


def test_nothing_imports_the_facade() -> None:
    assert [module for module, others in layers.imports().items() if "" in others] == []


def test_the_picture_shows_the_imports() -> None:
    assert layers.picture_on_the_page() == layers.picture(), "run: python tests/support/layers.py"


def test_every_folder_of_the_road_is_described_in_its_order() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", layers.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(layers.FOLDERS)


def test_files_that_the_page_names_exist() -> None:
    page = layers.PAGE.read_text(encoding="utf-8")
    paths = [path.as_posix() for path in layers.ROOT.glob("[!.]*/**/*")]
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|json|toml)|(?:[\w-]+/)+)`", page)
    assert len(named) > 100
    assert [
        name for name in named if not any(f"{path}/".endswith(f"/{name.rstrip('/')}/") for path in paths)
    ] == []


def test_classes_that_mean_different_things_have_different_names() -> None:
    """One word, one meaning; an underscore in front makes no other word."""
    homes = defaultdict(list)
    for name, path in layers.modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(name)
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    shared.pop("MemtriageCallback")  # the same thing for each framework
    assert shared == {}


def test_packages_hold_a_docstring_of_what_belongs_there_and_nothing_else() -> None:
    for name, path in layers.modules().items():
        if name and path.name == "__init__.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert ast.get_docstring(tree), f"{name} does not say what belongs there"
            assert len(tree.body) == 1, f"{name}/__init__.py holds more than a docstring"


SCENARIOS = {
    "account/no_trace",
    "catalogue/known",
    "integrations/extras",
    "integrations/notebook/kernel",
    "integrations/notebook/shell",
    "messages/tools",
    "messages/words",
    "model/schemas",
    "outside/zoo_scripts",
    "planning/code",
    "planning/rungs/edits",
    "playbook/advice",
    "prediction/combined_meshes",
    "prediction/programs",
    "prediction/unchanged_programs",
    "report/monitoring/grafana",
    "session/ranks",
    "session/simulated_gpu",
    "snapshots/programs",
    "treat/deepspeed/real",
    "treat/offload/bits",
    "treat/offload/faults",
    "treat/offload/memory",
    "treat/offload/partition",
    "treat/offload/state",
    "treat/parking/faults",
}
"""Tests of several files together, named after what happens in them."""


def test_tests_are_found_by_the_name_of_what_they_test() -> None:
    """`tests/F/test_N.py` tests `src/memtriage/F/N.py`, or a part of it where it is `test_N_part.py`."""
    files = {name.replace(".", "/") for name, path in layers.modules().items() if path.name != "__init__.py"}
    strangers = set()
    for path in sorted((layers.ROOT / "tests").rglob("test_*.py")):
        folder = path.parent.relative_to(layers.ROOT / "tests").as_posix()
        if not (layers.PACKAGE / folder).is_dir() or folder == ".":
            continue
        words = path.stem.removeprefix("test_").split("_")
        tested = {f"{folder}/{'_'.join(words[:count])}" for count in range(1, len(words) + 1)}
        if not tested & files:
            strangers.add(f"{folder}/{'_'.join(words)}")
    assert strangers <= SCENARIOS


def test_no_folder_has_the_name_of_a_public_function() -> None:
    public = set(memtriage.__all__)
    folders = {
        name.rpartition(".")[2] for name, path in layers.modules().items() if path.name == "__init__.py"
    }
    assert not folders & public


def test_public_names_are_where_the_stub_says() -> None:
    assert "__version__" in memtriage.__all__ and "load_ipython_extension" in dir(memtriage)
    for name in memtriage.__all__:
        assert getattr(memtriage, name) is not None


def test_importing_the_package_loads_no_library() -> None:
    code = "import sys, memtriage; print({'torch', 'msgspec', 'rich', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
