"""Command line and environment of a trial."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memtriage.prove.command import command, environment, torch_version
from memtriage.prove.table import TrialsError
from memtriage.prove.trials import Variant
from support.trials import parsed, trials_of


def test_one_process(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a")
    made = command(trials, Variant("a", args=("--x", "1"), host_tuning=True), tmp_path / "t")
    record = str(tmp_path / "t" / "record")
    options = ["-m", "memtriage", "run", "-o", record, "--host-tuning", "-m", "job", "--x", "1"]
    assert made == [sys.executable, *options]


def test_several_ranks_run_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    text = '[trials]\nscript = "train.py"\nranks = 4\npython = "/opt/python"\n[[variant]]\nname = "a"'
    made = command(parsed(text, tmp_path), Variant("a"), tmp_path / "t")
    assert made[:6] == ["/opt/python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert made[-1] == str(tmp_path / "train.py")
    assert made[made.index("memtriage") - 1 :][:3] == ["-m", "memtriage", "run"]


@pytest.mark.parametrize(
    ("torch", "name", "other"),
    [
        ((2, 13), "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 10), "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 9), "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        (None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_allocators_settings_by_version(
    tmp_path: Path, torch: tuple[int, int] | None, name: str, other: str
) -> None:
    inherited = {name: "old:1", other: "old:2"}
    made = environment(Variant("a", allocator="expandable_segments:True"), inherited, tmp_path, torch)
    assert made[name] == "expandable_segments:True"
    assert other not in made
    assert not {name, other} & set(environment(Variant("a", allocator=""), inherited, tmp_path, torch))
    untouched = environment(Variant("a"), inherited, tmp_path, torch)
    assert (untouched[name], untouched[other]) == ("old:1", "old:2")


def test_what_a_variant_sets_and_takes_out(tmp_path: Path) -> None:
    base = {"KEEP": "1", "DROP": "1", "RANK": "3", "WORLD_SIZE": "8", "MEMTRIAGE_DIR": "elsewhere"}
    variant = Variant("a", env={"DROP": None, "NEW": "2", "GONE": None}, phase=False)
    made = environment(variant, base, tmp_path, None)
    assert (made["KEEP"], made["NEW"], made["MEMTRIAGE_PHASE"]) == ("1", "2", "off")
    assert made["MEMTRIAGE_TRIAL"] == str(tmp_path)
    assert not {"DROP", "GONE", "RANK", "WORLD_SIZE", "MEMTRIAGE_DIR"} & set(made)
    on = environment(Variant("a", phase=True), base, tmp_path, None)
    assert on["MEMTRIAGE_PHASE"] == "on"
    assert "MEMTRIAGE_PHASE" not in environment(Variant("a"), base, tmp_path, None)


def test_the_version_of_another_interpreters_torch(tmp_path: Path) -> None:
    assert torch_version(sys.executable) == torch_version(None)
    with pytest.raises(TrialsError, match="cannot be started"):
        torch_version(str(tmp_path / "python"))
