"""One row of facts per plugin: from metadata alone, or with what loading added."""

import sys

import pytest
from kvdock.plugins.loading import load
from kvdock.plugins.report import Row, rows


def test_without_a_registry_rows_hold_what_the_metadata_says(site):
    """L-11: listing needs no import."""
    found = site("good", "broken", "pair")
    assert [(row.name, row.status, row.entry_point) for row in rows(found)] == [
        ("aa_broken", "found", "site_broken"),
        ("vend", "found", "site_vend:hardware"),
        ("zz_good", "found", "site_good"),
        ("vend.fam", "found", "site_vend:pair"),
    ]
    assert not [name for name in sys.modules if name.startswith("site_")]


@pytest.mark.filterwarnings("ignore::kvdock.plugins.loading.PluginWarning")
def test_with_a_registry_rows_hold_status_contract_hooks_and_reason(site, mock_plugin):
    """L-02: the listing shows status failed, with the cause."""
    found = site("good", "broken", "pair", "heavy", "family")
    core = mock_plugin("core", tier="core", objection="no")
    registry = load(found, hardware={"zz_good", "aa_broken"}, deny=("fam",), builtins=[("core", core)])
    facts = {row.name: row for row in rows(found, registry)}
    assert [(row.name, row.status) for row in facts.values()] == [
        ("core", "loaded"),
        ("aa_broken", "failed"),
        ("heavy", "found"),
        ("vend", "found"),
        ("zz_good", "loaded"),
        ("fam", "denied"),
        ("vend.fam", "inactive"),
    ]
    assert facts["zz_good"] == Row(
        name="zz_good",
        tier="hardware",
        distribution="kvdock-good",
        version="1.2",
        entry_point="site_good",
        status="loaded",
        contract="0.1",
        hooks=("device_catalogue",),
    )
    assert facts["core"].hooks == ("validate_plan", "validate_prefill_only")
    assert facts["aa_broken"].reason.endswith("No module named 'vendor_sdk_that_is_not_installed'")
    assert facts["fam"].reason == "left out by no_plugins"
    assert facts["vend.fam"].reason == "waits for vend (hardware) and fam (family), which are not loaded"


def test_a_conflict_is_listed_with_both_distributions(site):
    """L-03"""
    found = rows(site("twice_a", "twice_b"))
    assert [(row.name, row.distribution, row.status) for row in found] == [
        ("twice", "kvdock-twice", "conflict"),
        ("twice", "kvdock-twice-fork", "conflict"),
    ]
    assert all("kvdock-twice 1.0" in row.reason and "kvdock-twice-fork 2.0" in row.reason for row in found)


def test_an_object_under_two_groups_has_two_rows(site):
    """L-16: both are listed, the shared object is registered once."""
    found = site("several")
    shared = [row for row in rows(found, load(found)) if row.name == "shared"]
    assert [(row.tier, row.status, row.reason) for row in shared] == [
        ("hardware", "loaded", ""),
        ("family", "loaded", "the same object as shared, asked once"),
    ]
