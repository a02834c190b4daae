"""Programs with the habits of popular ones are predicted as they are, and as their build functions."""

import runpy
from pathlib import Path

import pytest
import torch

from memtriage.prediction.api import predict_program
from memtriage.prediction.script import Script

PROGRAMS = Path(__file__).parent / "programs"
BUILDS = runpy.run_path(str(PROGRAMS / "builds.py"))
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "builds")
WITH_A_FOLDER = {"resumed"}


def owned(prediction):
    """What the model does not have counts as one: a script may make before its first step what a build
    function makes in it, and which of it lives on is known by what frees it after the step."""
    by_name = dict(prediction.by_owner)
    by_name["made"] = sum(by_name.pop(name, 0) for name in ("activation", "temporary", "kept"))
    return by_name


@pytest.fixture(autouse=True)
def settings_kept(monkeypatch, tmp_path):
    """What a program sets for its process is set for it alone."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_has_the_peak_of_its_build_function(name, tmp_path):
    arguments = [str(tmp_path)] if name in WITH_A_FOLDER else []
    script = Script(str(PROGRAMS / f"{name}.py"), arguments)
    prediction = predict_program(script)
    expected = predict_program(BUILDS[name])
    assert (prediction.peak_allocated, prediction.peak_phase) == (
        expected.peak_allocated,
        expected.peak_phase,
    )
    assert prediction.peak_reserved == expected.peak_reserved
    assert owned(prediction) == owned(expected)
