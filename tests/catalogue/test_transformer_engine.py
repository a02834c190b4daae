"""TransformerEngine's entries: the versions that have one, and the functions that a recording shows."""

from __future__ import annotations

from memtriage.catalogue.transformer_engine import TRANSFORMER_ENGINE

ENTRIES = {entry.name: entry for entry in TRANSFORMER_ENGINE}


def test_an_entry_names_its_library_and_where_it_may_be_installed() -> None:
    for entry in TRANSFORMER_ENGINE:
        assert entry.library == "TransformerEngine" and entry.name.startswith("te.")
        assert entry.distributions[0] == "transformer_engine"
        assert entry.package in ("transformer_engine", "")


def test_a_recording_s_stack_shows_the_library_s_own_functions() -> None:
    sites = {site for entry in TRANSFORMER_ENGINE for site in entry.sites}
    assert {site.path for site in sites} == {"transformer_engine/"}
    (workspace,) = ENTRIES["te.fp8_workspaces"].sites
    assert workspace.functions == {"get_weight_workspace"}


def test_only_a_mark_keeps_nothing_of_what_it_leads_to() -> None:
    assert [entry.name for entry in TRANSFORMER_ENGINE if not entry.keeps] == ["te.do_not_clear"]
