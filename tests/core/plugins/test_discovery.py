"""What is installed is read from metadata, once, importing nothing."""

import sys

import importlib_metadata
import pytest
from kvdock.plugins import discovery
from kvdock.plugins.discovery import Candidate, discover


def write_dist(folder, name, version, entry_points, kind="dist-info"):
    info = folder / f"{name.replace('-', '_')}-{version}.{kind}"
    info.mkdir(parents=True)
    file = "PKG-INFO" if kind == "egg-info" else "METADATA"
    (info / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_candidate_holds_what_the_metadata_says(site):
    assert site("good") == (
        Candidate(
            name="zz_good",
            tier="hardware",
            group="kvdock.hardware",
            value="site_good",
            distribution="kvdock-good",
            version="1.2",
        ),
    )


def test_the_group_is_the_tier_and_a_variant_needs_its_two_parts(site):
    found = site("pair", "family")
    assert [(c.name, c.tier, c.needs) for c in found] == [
        ("vend", "hardware", ()),
        ("fam", "family", ()),
        ("vend.fam", "variant", ("vend", "fam")),
    ]


def test_finding_imports_nothing(site):
    """L-11: listing needs no import, not even of plugins that fail when they are imported."""
    found = site("broken", "leaving", "heavy", "good")
    assert [c.name for c in found] == ["aa_broken", "heavy", "leaving", "zz_good"]
    assert not [name for name in sys.modules if name.startswith("site_")]


def test_a_linked_folder_on_the_path_is_found_once(site, tmp_path):
    """L-03: a site folder and a link to it."""
    folder = tmp_path / "lib"
    write_dist(folder, "kvdock-x", "1.0", "[kvdock.hardware]\nx = x_hooks\n")
    (tmp_path / "lib64").symlink_to(folder)
    found = discover([str(folder), str(tmp_path / "lib64")])
    assert [(c.name, c.status) for c in found] == [("x", "found")]


def test_old_metadata_beside_new_is_one_plugin_of_the_newer_version(tmp_path):
    """L-03: a .dist-info and an older .egg-info of the same distribution."""
    write_dist(tmp_path, "kvdock-x", "1.9", "[kvdock.hardware]\nx = x_hooks\n", kind="egg-info")
    write_dist(tmp_path, "kvdock-x", "1.10", "[kvdock.hardware]\nx = x_hooks\n")
    found = discover([str(tmp_path)])
    assert [(c.name, c.version, c.status) for c in found] == [("x", "1.10", "found")]


def test_the_first_on_the_path_gives_the_version(tmp_path):
    write_dist(tmp_path / "front", "kvdock-x", "1.0", "[kvdock.hardware]\nx = x_hooks\n")
    write_dist(tmp_path / "behind", "kvdock-x", "2.0", "[kvdock.hardware]\nx = x_hooks\n")
    assert [c.version for c in discover([str(tmp_path / "front"), str(tmp_path / "behind")])] == ["1.0"]


def test_one_name_with_two_values_is_a_conflict_that_names_both(site):
    """L-03: a true conflict, the same name with another value."""
    found = site("twice_a", "twice_b")
    assert [(c.name, c.distribution, c.status) for c in found] == [
        ("twice", "kvdock-twice", "conflict"),
        ("twice", "kvdock-twice-fork", "conflict"),
    ]
    assert {c.reason for c in found} == {
        "the name 'twice' in kvdock.hardware belongs to kvdock-twice 1.0 (site_twice_a) and "
        "kvdock-twice-fork 2.0 (site_twice_b); uninstall all but one"
    }


def test_stale_metadata_that_names_another_module_does_not_shadow_the_new_one(tmp_path):
    """L-04: both are listed, and the clash is named instead of the older one winning."""
    write_dist(tmp_path, "kvdock-x", "1.0", "[kvdock.hardware]\nx = x.old\n", kind="egg-info")
    write_dist(tmp_path, "kvdock-x", "2.0", "[kvdock.hardware]\nx = x.hooks\n")
    found = discover([str(tmp_path)])
    assert [(c.value, c.status) for c in found] == [("x.hooks", "conflict"), ("x.old", "conflict")]


@pytest.mark.parametrize("name", ["cpu", "core"])
def test_a_reserved_name_is_refused(site, name):
    """L-08: the name of a built-in plugin used by an external one."""
    found = {c.name: c for c in site("reserved")}
    assert found[name].status == "failed"
    assert found[name].reason == f"the name {name!r} is reserved for a built-in plugin; rename the entry point"


def test_a_variant_without_two_parts_in_its_name_is_refused(site):
    (found,) = site("odd_variant")
    assert (found.status, found.reason) == ("failed", "the variant 'odd' must be named '<hardware>.<family>'")


def test_a_hardware_name_with_a_dot_and_a_name_with_a_colon_are_refused():
    assert discovery.refuse_name("a.b", "hardware") == "the hardware 'a.b' must be named one word"
    assert discovery.refuse_name("a:b", "hardware").startswith("'a:b' is no name for a plugin; use letters")


def test_several_entry_points_of_one_distribution_are_all_listed(site):
    """L-16: a distribution with entry points a and b, and one object under two groups."""
    assert [(c.name, c.tier) for c in site("several")] == [
        ("a", "hardware"),
        ("shared", "hardware"),
        ("b", "family"),
        ("shared", "family"),
    ]


def test_500_distributions_cost_one_scan(tmp_path, monkeypatch):
    """L-11: one scan per process and path, filtered by group."""
    for number in range(499):
        write_dist(tmp_path, f"other-{number}", "1.0", "[console_scripts]\nrun = other:main\n")
    write_dist(tmp_path, "kvdock-x", "1.0", "[kvdock.families]\nx = x_hooks\n")
    scans, parsed = [], []
    real, read_text = importlib_metadata.distributions, importlib_metadata.PathDistribution.read_text
    monkeypatch.setattr(importlib_metadata, "distributions", lambda **where: scans.append(where) or real(**where))

    def counted(dist, filename):
        if filename in ("METADATA", "PKG-INFO"):
            parsed.append(dist)
        return read_text(dist, filename)

    monkeypatch.setattr(importlib_metadata.PathDistribution, "read_text", counted)
    first = discover([str(tmp_path)])
    assert discover([str(tmp_path)]) is first
    assert [c.name for c in first] == ["x"]
    assert scans == [{"path": [str(tmp_path)]}]
    assert len(parsed) == 1


def test_a_new_path_is_scanned_again(tmp_path):
    write_dist(tmp_path / "a", "kvdock-x", "1.0", "[kvdock.families]\nx = x_hooks\n")
    assert discover([str(tmp_path)]) == ()
    assert [c.name for c in discover([str(tmp_path), str(tmp_path / "a")])] == ["x"]


def test_the_default_path_is_where_python_looks(site):
    site("good")
    assert "zz_good" in [c.name for c in discover()]


def test_metadata_that_cannot_be_read_is_skipped_and_logged(tmp_path, caplog):
    write_dist(tmp_path, "kvdock-x", "1.0", "[kvdock.families]\nx = x_hooks\n")
    write_dist(tmp_path, "kvdock-y", "1.0", "")
    (tmp_path / "kvdock_y-1.0.dist-info" / "entry_points.txt").write_bytes(b"[kvdock.families]\ny = \xff\xfe\n")
    with caplog.at_level("WARNING", logger="kvdock"):
        found = discover([str(tmp_path)])
    assert [c.name for c in found] == ["x"]
    assert f"the metadata of kvdock-y 1.0 in {tmp_path} cannot be read and is skipped: 'utf-8' codec" in caplog.text


def test_one_malformed_entry_point_file_costs_only_its_own_distribution(tmp_path, caplog):
    write_dist(tmp_path, "kvdock-x", "1.0", "[kvdock.families]\nx = x_hooks\n")
    write_dist(tmp_path, "kvdock-y", "1.0", "[kvdock.hardware]\ny = y_hooks\nnonsense line\n")
    (tmp_path / "kvdock_y-1.0.dist-info" / "METADATA").unlink()
    with caplog.at_level("WARNING", logger="kvdock"):
        found = discover([str(tmp_path)])
    assert [c.name for c in found] == ["x"]
    assert [record.getMessage() for record in caplog.records] == [
        f"the metadata of a distribution in {tmp_path} cannot be read and is skipped: "
        "entry_points.txt: 'nonsense line' is not name = value; reinstall or remove it"
    ]


def test_an_entry_point_without_a_name_cannot_be_loaded_and_the_others_can(tmp_path):
    write_dist(tmp_path, "kvdock-y", "1.0", "[kvdock.hardware]\n = y_hooks\nx = x_hooks\n")
    found = discover([str(tmp_path)])
    assert [(c.name, c.status) for c in found] == [("", "failed"), ("x", "found")]
    assert found[0].reason == "'' is no name for a plugin; use letters, digits, '-' and '_'"
