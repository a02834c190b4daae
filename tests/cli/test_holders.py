"""`memtriage holders`: the catalogue as a table and as JSON."""

from __future__ import annotations

import json

import pytest

from memtriage.catalogue.catalogue import BUILT_IN
from memtriage.catalogue.installed import holders_here
from memtriage.cli.app import main


def test_json_has_the_whole_catalogue(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["holders", "--json"]) == 0
    said = json.loads(capfdbinary.readouterr().out)
    assert said["schema"] == 1
    assert [holder["name"] for holder in said["holders"]] == [holder.name for holder in BUILT_IN]
    (workspaces,) = [holder for holder in said["holders"] if holder["name"] == "te.fp8_workspaces"]
    assert workspaces["forbidden"] == ["graphs", "backward"]
    assert workspaces["policy"] == "automatic" and workspaces["clears"] and workspaces["refills"]
    assert said["not_detected"][0].keys() == {"library", "what", "helps"}


def test_the_table_names_what_applies_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["holders"]) == 0
    out = capsys.readouterr().out
    assert f"{len(BUILT_IN)} known holders" in out
    assert "torch.pinned_cache" in out and "generic.module_attributes" in out


def test_what_is_not_installed_is_listed_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    absent = {holder.name for holder in holders_here(BUILT_IN) if not holder.applies}
    assert absent
    assert main(["holders"]) == 0
    assert not [name for name in absent if name in capsys.readouterr().out.split()]
    assert main(["holders", "--all"]) == 0
    assert absent <= set(capsys.readouterr().out.split())
