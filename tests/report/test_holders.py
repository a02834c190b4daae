"""The catalogue in words, on the terminal."""

from __future__ import annotations

from typing import Any

from memtriage.catalogue.catalogue import BUILT_IN
from memtriage.catalogue.installed import holders_here
from memtriage.model.holders import HolderHere
from memtriage.report.holders import render
from support.printed import printed


def listed(version: str | None, *, every: bool) -> str:
    return printed(render, holders_here(BUILT_IN, lambda holder: version), every=every)


def test_what_is_not_installed_is_printed_only_when_asked_for() -> None:
    short, whole = listed(None, every=False), listed(None, every=True)
    assert "te.fp8_workspaces" not in short and "generic.lru_cache" in short
    assert "memtriage holders --all" in short and "memtriage holders --all" not in whole
    assert all(holder.name in whole for holder in BUILT_IN)
    assert "not installed" in whole


def test_versions_say_where_the_leak_is_and_which_has_the_fix() -> None:
    text = " ".join(listed("2.12.0", every=False).split())
    assert "TransformerEngine 2.12.0 has it: ops/fuser.py OperationFuser (from 2.0 on, fixed in 2.14)" in text
    assert "te.tensor_objects" not in listed("2.15.1", every=False)


def entry(**fields: Any) -> HolderHere:
    known: dict[str, Any] = {
        "name": "lib.cache", "library": "lib", "kind": "workspaces", "symbol": "lib._cache",
        "holds": "tables", "clears": "lib.clear()", "refills": "at the next call", "policy": "automatic",
        "why": "", "forbidden": ["graphs"], "version": "1.2", "applies": True,
        "versions": "from 1.0 on", "reason": "has it",
    }  # fmt: skip
    return HolderHere(**(known | fields))


def shown(*here: HolderHere, every: bool = False) -> list[str]:
    text = printed(render, here, every=every)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_an_entry_says_what_clears_it_and_when_it_must_not_be_cleared() -> None:
    assert shown(entry())[1:] == [
        "lib 1.2", "lib", "lib.cache workspaces, cleared: automatic", "symbol lib._cache", "keeps tables",
        "versions from 1.0 on", "here has it", "cleared by lib.clear()",
        "not while CUDA graphs are captured that may be replayed; a capture is under way",
        "refills at the next call",
    ]  # fmt: skip
    every_version = shown(entry(versions="all"))
    assert not {"versions all", "here has it"} & set(every_version)
    assert "not by itself slow" in shown(entry(policy="on request", why="slow"))
    never = shown(entry(policy="never", why="it is the program's", clears="", refills=""))
    assert "never it is the program's" in never
    assert not any(line.startswith(("not while", "refills", "cleared by")) for line in never)


def test_how_many_apply_here_and_how_many_are_left_out() -> None:
    two = (entry(), entry(name="other.cache", library="other", version=None, applies=False))
    lines = shown(*two)
    assert lines[0] == "2 known holders, 1 of them in what is installed here"
    assert "other not installed" in lines and "other.cache" not in " ".join(lines)
    assert lines[-1] == "1 more are not installed: `memtriage holders --all`"
    assert not any("--all" in line for line in shown(*two, every=True))
    assert not any("--all" in line for line in shown(two[0]))
