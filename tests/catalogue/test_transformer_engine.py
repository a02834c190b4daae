"""TransformerEngine's entries: the versions that have one, and the functions that a recording shows."""

from __future__ import annotations

from memtriage.catalogue.transformer_engine import TRANSFORMER_ENGINE

ENTRIES = {entry.name: entry for entry in TRANSFORMER_ENGINE}


def test_restored_tensors_stay_in_the_versions_before_each_place_was_mended() -> None:
    spans = ENTRIES["te.tensor_objects"].spans
    versions = ((1, 13), (2, 0), (2, 0, 9), (2, 1), (2, 13), (2, 14), (2, 14, 9), (2, 15), (3, 0))
    having = {
        version: [span.site.split(",")[0] for span in spans if span.covers(version)] for version in versions
    }
    fuser, attention = "ops/fuser.py OperationFuser", "FusedAttnFunc"
    assert having == {
        (1, 13): [],
        (2, 0): ["Linear", fuser, attention],
        (2, 0, 9): ["Linear", fuser, attention],
        (2, 1): [fuser, attention],
        (2, 13): [fuser, attention],
        (2, 14): [attention],
        (2, 14, 9): [attention],
        (2, 15): [],
        (3, 0): [],
    }
    assert [name for name, entry in ENTRIES.items() if entry.spans] == ["te.tensor_objects"]


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
