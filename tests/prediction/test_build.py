"""What a build function may return, and what is said of one that cannot be used."""

import sys
import types

import pytest
import torch
from torch import nn

import memtriage
from memtriage.observe.origin import package_folder
from memtriage.prediction import trace
from memtriage.prediction.build import BuildError, load, parameters_in

GPU_HERE = torch.cuda.is_available()


def model_on(device):
    model = nn.Linear(4, 4).to(device)
    return model, torch.optim.SGD(model.parameters()), lambda: None


def missing(error):
    raise error


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda device: None, "returned a NoneType"),
        (lambda device: (1, 2), "returned 2 things"),
        (lambda device: ("model", None, None), "first part is a str"),
        (lambda device: (nn.Linear(1, 1), 7, None), "second part is a int"),
        (lambda device: (*model_on(device)[:2], 7), "third part is a int"),
        (lambda device: (nn.ReLU(), *model_on(device)[1:]), "no parameters"),
        (lambda device: model_on("cpu"), "use the `device`"),
        (lambda: None, "expected `build"),
    ],
)
def test_what_it_returns_is_checked(build, said):
    with pytest.raises(BuildError, match=said):
        memtriage.predict(build)


def failing(what):
    def build(device):
        model, optimizer, _ = model_on(device)
        return model, optimizer, lambda: what(device)

    return build


async def later(*_):
    return None


torch.library.define("memtriage_tests::opaque", "(Tensor given) -> Tensor")
opaque = torch.ops.memtriage_tests.opaque


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda device: 1 / 0, "raised ZeroDivisionError at .*test_build.py"),
        (lambda device: opaque(torch.randn(4, device=device)), "register_fake"),
        (lambda device: torch.randn(4, 4, device=device) @ torch.randn(4, 4), "send inputs"),
        (lambda device: sys.exit(3), r"sys.exit\(3\)"),
        (lambda device: torch.ones(2, device=device).sum().backward(), "train at least one parameter"),
        (lambda device: missing(ImportError("No module named 'mpi4py'")), "mpi4py'; .*--world-size N"),
        (lambda device: missing(OSError("CUDA_HOME is not set")), "not set; .*use torch's optimizers"),
        (lambda device: missing(OSError("numpy.npy is not there")), "numpy.npy is not there$"),
        (lambda device: later(), "step.* returned a coroutine"),
        (lambda device: (letter for letter in "ab"), "step.* returned a generator"),
        pytest.param(
            lambda device: torch.cuda.CUDAGraph(),
            "CUDA graphs cannot be traced",
            marks=pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for CUDA can make one"),
        ),
        (lambda device: [7][int(torch.randn(1 << 23, device=device).sum())], "value of the device led here"),
    ],
)
def test_what_it_raises_says_where_and_what_to_change(what, said):
    with pytest.raises(BuildError, match=said):
        memtriage.predict(failing(what))
    assert torch.cuda.is_available() is GPU_HERE


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("no such attribute"),
        RuntimeError(f'cannot compile: File "{package_folder()}prediction/trace.py", line 1'),
    ],
)
def test_a_mistake_of_memtriage_is_not_said_of_the_program(error, monkeypatch):
    def made(function):
        # Innermost in the traceback, as of a mistake there.
        return types.FunctionType(function.__code__.replace(co_filename=trace.__file__), globals())

    monkeypatch.setattr(trace, "check_built", made(missing))
    with pytest.raises(BuildError, match=r"^this is a fault of memtriage.* please report it: "):
        memtriage.predict(lambda device: error)


def test_an_error_of_the_program_below_memtriage_is_the_program_s():
    def build(device):
        model, optimizer, _ = model_on(device)
        return model, optimizer, lambda: torch.zeros(2, device=device)[5]

    with pytest.raises(BuildError, match=r"^the program raised IndexError"):
        memtriage.predict(build)


def test_a_function_is_loaded_from_its_file(tmp_path):
    (tmp_path / "helper.py").write_text("ANSWER = 42\n")
    file = tmp_path / "train.py"
    file.write_text("from helper import ANSWER\ndef build(device):\n    return ANSWER\n")
    assert load(f"{file}:build")("cuda") == 42


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("x = 1", "train.py", "names no function"),
        ("x = 1", "nowhere.py:build", "no such file"),
        ("def make(): ...", "train.py:build", "it has make"),
        ("import no_such_module_at_all", "train.py:build", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, target, said):
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(BuildError, match=said):
        load(str(tmp_path / target))


def test_an_async_build_is_told_from_what_it_would_return():
    with pytest.raises(BuildError, match="async def"):
        memtriage.predict(later)


def test_parameters_of_the_model_and_of_optimizers_come_once_each():
    model, other = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    optimizers = (torch.optim.SGD(model.parameters()), torch.optim.SGD([model.weight, other]))
    parameters = list(parameters_in([model], optimizers))
    assert [id(each) for each in parameters] == [id(each) for each in (model.weight, model.bias, other)]
