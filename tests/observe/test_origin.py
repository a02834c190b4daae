"""Whose code a file of this process is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from memtriage.observe import origin
from memtriage.observe.origin import CodeOrigin, package_folder


def test_a_script_is_the_users(tmp_path: Path) -> None:
    assert CodeOrigin().is_user_file(str(tmp_path / "train.py"))
    assert CodeOrigin().is_user_file(str(tmp_path / "train"))  # a script needs no suffix


@pytest.mark.parametrize(
    "file",
    [
        json.__file__,
        torch.__file__,
        pytest.__file__,
        origin.__file__,
        "/elsewhere/lib/python3.12/site-packages/pkg/a.py",
        "<string>",
        "",
        None,
    ],
)
def test_other_code_is_not_the_users(file: str | None) -> None:
    assert not CodeOrigin().is_user_file(file)


def test_a_link_to_a_library_is_not_the_users(tmp_path: Path) -> None:
    link = tmp_path / "mine.py"
    link.symlink_to(json.__file__)
    assert not CodeOrigin().is_user_file(str(link))


def test_is_own_file_is_true_of_memtriage_only() -> None:
    assert CodeOrigin().is_own_file(origin.__file__)
    assert not CodeOrigin().is_own_file(__file__)
    assert package_folder().endswith("/memtriage/")
