"""What a process has resident before it makes a tensor, and the imports that decide it."""

import builtins
import importlib
import os
import subprocess

import numpy.fft  # noqa: F401  # else its own imports are noted with it
import pytest

from memtriage.prediction.fake_cuda.tensors import kernel
from memtriage.prediction.host.libraries import Imports, measure, measure_worker
from memtriage.prediction.host.memory import Libraries


def noted(text, folder):
    """Installed modules that a program of some lines imports."""
    imports = Imports()
    file = folder / "program.py"
    file.write_text(text)
    with imports.followed():
        exec(compile(text, str(file), "exec"), {"__name__": "program", "__package__": None})
    return {
        name for name in imports.names if name.partition(".")[0] in ("numpy", "torch", "email", "program")
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import numpy", {"numpy"}),
        ("import numpy.linalg", {"numpy.linalg"}),
        ("from numpy import linalg, ones", {"numpy", "numpy.linalg"}),
        ("import importlib\nimportlib.import_module('numpy.fft')", {"numpy.fft"}),
        ("import importlib\nimportlib.import_module('.fft', 'numpy')", {"numpy.fft"}),
        ("import email.message", {"email.message"}),
        ("import memtriage.model.units", set()),
        ("", set()),
    ],
    ids=["one", "part", "members", "by function", "relative", "standard", "own", "none"],
)
def test_imports_of_installed_modules_are_noted(tmp_path, text, names):
    before = builtins.__import__, importlib.import_module
    assert noted(text, tmp_path) == names
    assert (builtins.__import__, importlib.import_module) == before


def test_imports_within_kernels_are_not_the_programs():
    imports = Imports()
    with imports.followed(), kernel():
        importlib.import_module("numpy")
        exec("import numpy.fft", {})
    assert imports.names == set()


class Ran:
    """Stands for a process that printed something."""

    def __init__(self, text, code=0):
        self.stdout, self.returncode = text, code


KIB = "Name:\tpython\nRssAnon:\t{} kB\nRssFile:\t{} kB\nRssShmem:\t{} kB\n"


@pytest.fixture
def processes(monkeypatch):
    """Answers of the processes that are started, in order, and how they were started."""
    answers, started = [], []

    def run(command, *, input, **options):
        started.append((command[3:], input, options["timeout"] > 10))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(subprocess, "run", run)
    return answers, started


@pytest.mark.parametrize(
    ("answers", "trains", "world", "expected"),
    [
        ([Ran(KIB.format(100, 20, 3))], False, 1, Libraries(own=103 << 10, shared=20 << 10)),
        (
            [Ran(KIB.format(100, 20, 3)), Ran(KIB.format(7, 1, 1))],
            True,
            2,
            Libraries(own=103 << 10, shared=20 << 10, launcher=7 << 10),
        ),
        ([Ran("RssAnon:\t5 kB\n")], False, 1, Libraries(own=5 << 10)),
        ([Ran("RssFile:\t5 kB\n")], False, 1, None),
        ([Ran(KIB.format(1, 1, 1), code=1)], False, 1, None),
        ([OSError("no")], False, 1, None),
        ([subprocess.TimeoutExpired("python", 120)], False, 1, None),
        ([Ran(KIB.format(1, 1, 1)), Ran("", code=1)], False, 2, None),
    ],
)
def test_a_fresh_process_is_measured(processes, answers, trains, world, expected):
    processes[0].extend(answers)
    assert measure({"numpy", "json"}, trains, world) == expected
    assert processes[1][0] == ([str(int(trains)), str(int(world > 1))], "json\nnumpy", True)
    assert processes[1][1:] == ([([], "", True)] if world > 1 else [])


@pytest.mark.parametrize("forked", [True, False])
def test_a_worker_is_measured_for_itself(processes, forked):
    processes[0].extend([Ran("RssAnon:\t9 kB\n"), Ran("")])
    assert [measure_worker(forked), measure_worker(forked)] == [9 << 10, None]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="sizes are read from /proc")
def test_a_real_process_has_some_memory_of_its_own():
    found = measure({"json"}, False, 1)
    assert found is not None and found.launcher == 0
    assert 10 << 20 < found.own < 10 << 30 and found.shared > 1 << 20
