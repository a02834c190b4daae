"""Whose code a file is, by its path."""

from __future__ import annotations

import pytest

from memtriage.model.code_origin import code_owner, is_installed, is_torch, path_below

SITE = "/env/lib/python3.12/site-packages"


@pytest.mark.parametrize(
    ("path", "root", "owner"),
    [
        ("/home/u/train.py", None, "user"),
        ("/home/u/models/torch/net.py", None, "user"),
        (f"{SITE}/transformers/trainer.py", None, "library"),
        (f"{SITE}/mypkg/train.py", f"{SITE}/mypkg", "user"),
        ("/home/u/.venv/lib/python3.12/site-packages/x/a.py", "/home/u", "library"),
        ("/usr/lib/python3.12/runpy.py", None, "library"),
        (f"{SITE}/torch/nn/linear.py", None, "internal"),
        ("/opt/pytorch/pytorch/torch/_tensor.py", None, "internal"),
        ("/home/u/src/torch-fork/torch/_tensor.py", None, "internal"),
        ("/tmp/torchinductor_root/ab/cab.py", None, "internal"),
        ("<eval_with_key>.3", None, "internal"),
        ("<stdin>", None, "user"),
        ("<ipython-input-1>", None, "user"),
        ("/pytorch/c10/core.cpp", None, "internal"),
        ("??", None, "internal"),
        ("", None, "internal"),
    ],
)
def test_code_owner(path: str, root: str | None, owner: str) -> None:
    assert code_owner(path, root, ("/home/u/src/torch-fork/torch/",)) == owner


@pytest.mark.parametrize(
    ("path", "installed"),
    [
        (f"{SITE}/x/a.py", True),
        ("site-packages/x/a.py", True),
        ("/usr/lib/python3/dist-packages/x/a.py", True),
        ("/usr/lib64/python3.13t/json/decoder.py", True),
        ("/usr/lib/python3.11/json/decoder.py:355 in decode", True),
        ("/home/u/my-site-packages/a.py", False),
        ("/home/u/lib/python/a.py", False),
    ],
)
def test_is_installed(path: str, installed: bool) -> None:
    assert is_installed(path) is installed


def test_is_torch_leaves_out_packages_with_similar_names() -> None:
    assert is_torch(f"{SITE}/torch/cuda/memory.py")
    assert not is_torch(f"{SITE}/torchvision/ops.py")
    assert not is_torch("/home/u/torch/ops.py")


@pytest.mark.parametrize(
    ("folder", "relative"),
    [
        ("/home/u", "pkg/net.py"),
        ("/home/u/", "pkg/net.py"),
        ("/home/other", None),
        ("/home/u/pk", None),
        (None, None),
    ],
)
def test_path_below(folder: str | None, relative: str | None) -> None:
    assert path_below("/home/u/pkg/net.py", folder) == relative
