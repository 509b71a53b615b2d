"""What is installed becomes a registry; what cannot be used is set aside with its reason, or stops the run."""

import sys
import warnings

import pytest
from kvdock import CONTRACT, hookimpl
from kvdock.errors import PluginError
from kvdock.plugins.loading import PluginWarning, load

BROKEN = (
    "plugin 'aa_broken' (kvdock-broken 0.3) failed to load from site_broken: "
    "ModuleNotFoundError: No module named 'vendor_sdk_that_is_not_installed'"
)


def statuses(registry):
    return {problem.name: problem.status for problem in registry.problems}


def test_a_good_plugin_loads_beside_a_broken_one_with_a_warning(site):
    """L-01: the warning names plugin, distribution, version and error."""
    with pytest.warns(PluginWarning) as caught:
        registry = load(site("broken", "good"))
    assert [str(w.message) for w in caught] == [f"{BROKEN}; it is left out"]
    assert [(m.name, m.distribution, m.version, m.module) for m in registry.members] == [
        ("zz_good", "kvdock-good", "1.2", "site_good")
    ]
    (problem,) = registry.problems
    assert (problem.name, problem.tier, problem.status) == ("aa_broken", "hardware", "failed")
    assert (problem.origin, problem.reason) == ("kvdock-broken 0.3", BROKEN)


def test_a_plugin_that_exits_is_set_aside(site):
    """L-01: raising SystemExit at import."""
    with pytest.warns(PluginWarning, match=r"'leaving' .* SystemExit: no licence for this device; it is left out"):
        registry = load(site("leaving", "good"))
    assert [m.name for m in registry.members] == ["zz_good"]


def test_a_plugin_that_fails_while_it_is_registered_leaves_nothing_behind(site):
    """L-01: half-registered pieces are rolled back."""
    with pytest.warns(PluginWarning, match=r"'half' .* get_pool_cls asks for 'extra', but the hook gives query"):
        registry = load(site("half", "good"))
    assert [m.name for m in registry.members] == ["zz_good"]
    assert [m.name for m, _ in registry.hookimpls("device_catalogue", "hardware")] == ["zz_good"]
    assert registry.hookimpls("get_pool_cls", "hardware") == ()


def test_strict_turns_a_failure_into_an_error(site):
    """L-01: strict mode raises."""
    with pytest.raises(PluginError) as caught:
        load(site("broken", "good"), strict=True)
    assert str(caught.value) == BROKEN
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_plugin_that_was_asked_for_by_name_must_load(site):
    """L-02: an explicitly requested platform that fails is an error."""
    with pytest.raises(PluginError, match=r"aa_broken.*kvdock-broken 0.3.*No module named"):
        load(site("broken", "good"), requested={"aa_broken"})


def test_a_plugin_that_is_allowed_by_name_must_load(site):
    """L-02: a name in the allow list is a name that was asked for."""
    with pytest.raises(PluginError) as caught:
        load(site("broken", "good"), allow=("aa_broken", "zz_good"))
    assert str(caught.value) == BROKEN


def test_a_plugin_that_nobody_named_may_fail(site):
    """L-02: without a request the failure is a visible warning with the cause, and is listed as failed."""
    with pytest.warns(PluginWarning, match="No module named 'vendor_sdk_that_is_not_installed'"):
        registry = load(site("broken", "good"), hardware={"aa_broken", "zz_good"})
    assert statuses(registry) == {"aa_broken": "failed"}


def test_hardware_that_is_allowed_by_name_is_imported_whatever_hardware_says(site):
    """L-02, L-11: a name in the allow list is a name that was asked for."""
    registry = load(site("good", "heavy"), allow=("zz_good",), hardware=())
    assert [(m.name, m.requested) for m in registry.members] == [("zz_good", True)]
    with pytest.raises(PluginError, match=r"aa_broken.*No module named"):
        load(site("broken"), allow=("aa_broken",), hardware=())


def test_a_variant_that_is_allowed_by_name_must_have_its_parts(site):
    with pytest.raises(PluginError, match=r"'vend.fam' \(kvdock-vend 1.0\) waits for fam \(family\)"):
        load(site("pair", "family"), allow=("vend", "vend.fam"))


def test_another_contract_is_one_clear_line(site):
    """L-07, L-12: a plugin that was built for another version of the contract."""
    with pytest.warns(PluginWarning) as caught:
        load(site("old_contract"))
    assert [str(w.message) for w in caught] == [
        "plugin 'old' (kvdock-old 0.9) was written for contract '0.0', this kvdock has '0.1'; "
        "install a release of kvdock-old for contract 0.1; it is left out"
    ]


def test_a_misspelt_hook_is_named_with_the_nearest_one(site):
    """L-14: a plugin that implements get_pol_cls."""
    with pytest.raises(PluginError) as caught:
        load(site("misspelt"), requested={"misspelt"})
    assert str(caught.value) == (
        "plugin 'misspelt' (kvdock-misspelt 0.6): get_pol_cls is no hook of kvdock; did you mean 'get_pool_cls'?"
    )


@pytest.mark.parametrize(
    ("argument", "option"),
    [("allow", "plugins"), ("deny", "no_plugins"), ("requested", "plugin"), ("hardware", "hardware")],
)
def test_an_unknown_name_in_a_list_is_an_error_with_the_nearest_and_all_found(site, argument, option):
    """L-04: a name that nothing installed has."""
    found = site("good", "family")
    with pytest.raises(PluginError) as caught:
        load(found, **{argument: ("zz_godd",)}, builtins=[("cpu", object())])
    assert str(caught.value) == (
        f"{option}: no plugin is called 'zz_godd'; did you mean 'zz_good'? (found: cpu, fam, zz_good)"
    )


def test_an_unknown_name_where_nothing_is_installed_says_so():
    with pytest.raises(PluginError, match=r"plugins: no plugin is called 'cuda' \(no plugin is installed\)"):
        load((), allow=("cuda",))


def test_an_empty_allow_list_means_the_core_only(site, mock_plugin):
    core = mock_plugin("core", tier="core")
    registry = load(site("good", "broken", "family"), allow=(), builtins=[("core", core)])
    assert [m.name for m in registry.members] == ["core"]
    assert statuses(registry) == {"aa_broken": "denied", "zz_good": "denied", "fam": "denied"}
    assert registry.problems[1].reason == "plugins is empty, which leaves the core alone; add zz_good"


def test_an_allow_list_imports_nothing_else(site):
    registry = load(site("good", "heavy"), allow=("zz_good",))
    assert "site_heavy" not in sys.modules
    assert [(p.name, p.reason) for p in registry.problems] == [("heavy", "not among plugins=zz_good; add heavy")]


def test_a_deny_list_imports_everything_else(site):
    registry = load(site("good", "heavy"), deny=("heavy",))
    assert "site_heavy" not in sys.modules
    assert [(p.name, p.status, p.reason) for p in registry.problems] == [("heavy", "denied", "left out by no_plugins")]


def test_a_built_in_plugin_cannot_be_left_out(mock_plugin):
    with pytest.raises(PluginError, match="no_plugins: 'core' is built in and cannot be left out"):
        load((), deny=("core",), builtins=[("core", mock_plugin("core", tier="core"))])


def test_a_plugin_cannot_be_asked_for_and_left_out(site):
    with pytest.raises(PluginError, match="'zz_good' is asked for and left out by no_plugins at once; drop one"):
        load(site("good"), requested={"zz_good"}, deny=("zz_good",))
    with pytest.raises(PluginError, match="'zz_good' is asked for and left out by no_plugins at once; drop one"):
        load(site("good"), allow=("zz_good",), deny=("zz_good",))
    with pytest.raises(PluginError, match=r"'zz_good' \(kvdock-good 1.2\) is asked for, but not among plugins=fam"):
        load(site("good", "family"), requested={"zz_good"}, allow=("fam",))


def test_only_the_hardware_that_matters_is_imported(site):
    """L-11: only selected plugins are imported; a heavy one stays out, and is no problem."""
    registry = load(site("heavy", "good", "family"), hardware={"zz_good"})
    assert [m.name for m in registry.members] == ["zz_good", "fam"]
    assert registry.problems == ()
    assert registry.names == ("fam", "heavy", "zz_good")
    assert "site_heavy" not in sys.modules


def test_requested_hardware_is_imported_whatever_hardware_says(site):
    registry = load(site("good"), hardware=(), requested={"zz_good"})
    assert [(m.name, m.requested) for m in registry.members] == [("zz_good", True)]


def test_a_variant_is_loaded_with_its_two_parts(site):
    registry = load(site("pair", "family"))
    assert [(m.name, m.tier) for m in registry.members] == [
        ("vend", "hardware"),
        ("fam", "family"),
        ("vend.fam", "variant"),
    ]


@pytest.mark.parametrize(
    ("folders", "missing"),
    [(("pair",), "fam (family)"), (("pair", "family"), "vend (hardware)")],
)
def test_a_variant_without_one_part_is_inactive_and_says_what_it_waits_for(site, folders, missing):
    found = site(*folders)
    registry = load(found, hardware=() if "family" in folders else None)
    (problem,) = [p for p in registry.problems if p.name == "vend.fam"]
    assert problem.status == "inactive"
    assert problem.reason == f"waits for {missing}, which is not loaded"


def test_a_variant_that_is_asked_for_must_have_its_parts(site):
    with pytest.raises(PluginError, match=r"'vend.fam' \(kvdock-vend 1.0\) waits for fam \(family\)"):
        load(site("pair"), requested={"vend.fam"})


def test_allowing_both_parts_allows_the_variant(site):
    registry = load(site("pair", "family"), allow=("vend", "fam"))
    assert [m.name for m in registry.members] == ["vend", "fam", "vend.fam"]


def test_denying_the_variant_keeps_its_parts(site):
    registry = load(site("pair", "family"), deny=("vend.fam",))
    assert [m.name for m in registry.members] == ["vend", "fam"]


def test_a_variant_of_a_built_in_device_needs_only_the_family(site, mock_plugin):
    found = site("family")
    variant = type(found[0])(
        name="cpu.fam", tier="variant", group="kvdock.variants", value="site_fam_cpu", needs=("cpu", "fam")
    )
    sys.modules["site_fam_cpu"] = mock_plugin("cpu.fam", tier="variant")
    registry = load((*found, variant), builtins=[("cpu", mock_plugin("cpu", tier="core"))])
    assert [m.name for m in registry.members] == ["cpu", "fam", "cpu.fam"]


def test_two_plugins_of_one_name_are_both_left_out(site):
    """L-03: a true conflict names both distributions, and neither is imported."""
    with pytest.warns(PluginWarning) as caught:
        registry = load(site("twice_a", "twice_b", "good"))
    assert len(caught) == 2
    assert all("kvdock-twice 1.0" in str(w.message) and "kvdock-twice-fork 2.0" in str(w.message) for w in caught)
    assert [(p.name, p.distribution, p.status) for p in registry.problems] == [
        ("twice", "kvdock-twice", "conflict"),
        ("twice", "kvdock-twice-fork", "conflict"),
    ]
    assert [m.name for m in registry.members] == ["zz_good"]


@pytest.mark.parametrize("wanted", [{"requested": {"twice"}}, {"allow": ("twice",)}, {"strict": True}])
def test_a_conflict_over_a_name_that_is_wanted_stops_the_run(site, wanted):
    with pytest.raises(
        PluginError, match=r"belongs to kvdock-twice 1.0 .* and kvdock-twice-fork 2.0 .*; uninstall all"
    ):
        load(site("twice_a", "twice_b"), **wanted)


@pytest.mark.filterwarnings("ignore::kvdock.plugins.loading.PluginWarning")
def test_a_reserved_name_is_refused_without_an_import(site):
    """L-08: a reserved built-in name used by an external plugin."""
    registry = load(site("reserved"))
    assert [(p.name, p.status) for p in registry.problems] == [("cpu", "failed"), ("core", "failed")]
    assert registry.members == ()


def test_an_object_under_two_groups_is_listed_twice_and_asked_once(site):
    """L-16: entry points a and b of one distribution, and one object under two groups."""
    registry = load(site("several"))
    assert [(m.name, m.tier, m.same_as) for m in registry.members] == [
        ("a", "hardware", ""),
        ("shared", "hardware", ""),
        ("b", "family", ""),
        ("shared", "family", "shared"),
    ]
    asked = [m.name for tier in ("hardware", "family") for m, _ in registry.hookimpls("validate_plan", tier)]
    assert asked == ["a", "shared", "b"]


def test_what_a_plugin_prints_goes_to_standard_error(site, capsys):
    load(site("noisy"))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "noisy is imported\n")


def test_the_order_of_candidates_does_not_matter(site):
    """L-05: install order never matters."""
    found = site("pair", "family", "good")
    there, back = load(found), load(found[::-1])
    assert [m.name for m in there.members] == [m.name for m in back.members] == ["vend", "zz_good", "fam", "vend.fam"]


def test_loading_twice_gives_registries_of_their_own(site, mock_plugin):
    found = site("good")
    first, second = load(found), load(found)
    first.add(mock_plugin("acme", tier="hardware"))
    assert [m.name for m in second.members] == ["zz_good"]


def test_a_good_plugin_loads_without_a_warning(site):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(site("good", "pair", "family", "several")).members) == 8


def test_an_entry_point_that_names_nothing_is_set_aside(site):
    (found,) = site("good")
    bad = type(found)(name="bad", tier="hardware", group="kvdock.hardware", value="site_good:missing")
    with pytest.warns(PluginWarning, match=r"'bad' \(no distribution\) failed to load from site_good:missing: Attrib"):
        load((found, bad))


def test_a_function_named_after_a_hook_but_not_marked_is_refused(registry):
    class Unmarked:
        kvdock_contract = CONTRACT

        @hookimpl
        def validate_plan(self, query):
            return None

        def get_pool_cls(self, query):
            return None

    with pytest.raises(PluginError, match=r"get_pool_cls is a hook's name but is not marked.*add @kvdock\.hookimpl"):
        registry.add(Unmarked(), name="acme", tier="hardware")
    assert registry.members == ()
