"""The compiled library: made once, made again for another compiler or source, refused with a reason."""

from __future__ import annotations

import os
import platform
import stat
from pathlib import Path

import pytest

from memtriage.treat.offload.native import build


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "memtriage"


def pretended(folder: Path, name: str, compiling: str) -> str:
    """A compiler that tells its version and, when it compiles, does what `compiling` says."""
    script = folder / name
    script.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo {name} && exit 0
echo once >> {folder}/calls
{compiling}
"""
    )
    script.chmod(0o755)
    return str(script)


WRITES = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("CXX", pretended(tmp_path, "pretended", WRITES))
    first = build.built()
    assert first.read_text() == "made\n"
    assert build.built() == first
    assert (tmp_path / "calls").read_text().split() == ["once", "once"]  # compiled, linked
    assert list(cache.iterdir()) == [first]  # no scratch is left
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_compiler_source_and_processor_choose_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", pretended(tmp_path, "one", WRITES))
    libraries = {build.built()}
    monkeypatch.setenv("CXX", pretended(tmp_path, "two", WRITES))
    libraries.add(build.built())
    monkeypatch.setattr(platform, "machine", lambda: "another")
    libraries.add(build.built())
    source = tmp_path / "adamw.cpp"
    source.write_text("other")
    monkeypatch.setattr(build, "SOURCE", source)
    libraries.add(build.built())
    assert len(libraries) == 4


def test_what_the_compiler_said_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("CXX", pretended(tmp_path, "broken", "echo first >&2; echo no such flag >&2; exit 3"))
    with pytest.raises(build.NotBuilt, match="could not be compiled: no such flag"):
        build.built()
    assert list(cache.iterdir()) == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(build.NotBuilt, match="/no/such/compiler"):
        build.built()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "COMPILERS", ("no-such-c++",))
    with pytest.raises(build.NotBuilt, match=r"none of no-such-c\+\+ is installed"):
        build.built()


def test_a_cache_that_others_can_write_to_is_not_executed(cache: Path) -> None:
    cache.mkdir()
    os.chmod(cache, 0o777)
    with pytest.raises(build.NotBuilt, match="others can write"):
        build.built()
