"""The suites of plugins and devices catch what breaks a promise, each by the check that is meant for it."""

import pytest
from kvdock.testing.suites import DeviceSuite, PluginSuite

PROBES = "test_a_probe_finds_a_device_or_says_why_not"
PLUGINS = {
    "Absent": {"test_the_entry_point_is_sound"},
    "Loud": {"test_the_entry_point_is_sound"},
    "Heavy": {"test_importing_it_imports_no_torch"},
    "Package": {"test_every_module_but_kernels_imports_without_torch"},
    "Old": {"test_the_contract_is_the_present_one", "test_plugins_check_lists_it_as_loaded"},
    "Any": {"test_another_contract_refuses_it"},
    "Misspelt": {"test_its_hooks_are_hooks"},
    "WrongType": {"test_every_case_is_planned"},
    "WrongKernels": {"test_kernels_are_a_kernel_set"},
    "Greedy": {"test_devices_of_others_are_declined"},
    "GreedyKernels": {"test_devices_of_others_are_declined"},
    "Nosy": {"test_devices_of_others_are_declined"},
    "Roaming": {"test_whole_plans_for_devices_of_others_are_left_alone"},
    "Writing": {"test_hooks_change_nothing"},
    "Square": {"test_models_of_every_shape_are_kept_or_declined"},
    "Fickle": {"test_hooks_answer_alike_each_time"},
    "Homeless": {"test_classes_say_where_they_run"},
    "Unnamed": {"test_classes_say_where_they_run"},
    "Half": {"test_no_method_of_the_interface_is_missing"},  # L-12
    "OtherArguments": {"test_no_method_of_the_interface_is_missing"},  # L-12
    "Wide": {"test_a_slot_costs_what_its_kind_costs"},  # P-14
    "Hoarding": {"test_planned_bytes_are_allocated_bytes"},
    "Twins": {"test_descriptors_tell_every_tensor_apart"},  # G-06
    "Unmarked": {"test_every_plan_has_a_fingerprint"},  # G-01
    "Imperial": {"test_models_of_others_are_declined"},
}
DEVICES = {
    "Capitals": {"test_names_are_lower_case_and_the_profiles_own"},
    "OtherKey": {"test_names_are_lower_case_and_the_profiles_own"},
    "Taken": {"test_names_are_nobody_elses"},
    "Overfull": {"test_usable_bytes_are_some_and_not_more_than_there_are"},
    "Thirds": {"test_granularity_is_a_power_of_two"},
    "Unsourced": {"test_sources_are_given"},
    "Hosts": {"test_no_device_is_the_hosts"},
    "Live": {"test_profiles_are_no_live_devices"},
    "Spaced": {"test_profiles_are_no_live_devices"},
    "Growing": {"test_the_catalogue_is_the_same_each_time"},
    "Tiny": {"test_a_plan_can_be_made_for_each_profile"},
    "Heavy": {"test_importing_the_plugin_imports_no_torch"},
    "Everywhere": {"test_a_missing_device_is_one_line"},
    "Crashing": {PROBES},
    "Verbose": {PROBES},
    "Nowhere": {PROBES},
}


@pytest.fixture(scope="module")
def failures(failures_of):
    pytest.importorskip("torch")
    site = [failures_of.folder / "site"]
    sound = {"Sound": {name for name in vars(PluginSuite) if name.startswith("test_")}}
    plugins = failures_of("plugins.py", PLUGINS | sound, site)
    sound = {"Sound": {name for name in vars(DeviceSuite) if name.startswith("test_")}}
    return {"plugin": plugins, "device": failures_of("devices.py", DEVICES | sound, site)}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_broken_plugin_is_caught_by_its_check(failures, name):
    assert failures["plugin"][name] == PLUGINS[name]


@pytest.mark.parametrize("name", DEVICES)
def test_a_wrong_device_is_caught_by_its_check(failures, name):
    assert failures["device"][name] == DEVICES[name]


@pytest.mark.parametrize("suite", ["plugin", "device"])
def test_a_sound_plugin_passes_every_check(failures, suite):
    assert failures[suite]["Sound"] == set()


def test_every_check_of_the_suites_catches_something():
    for suite, caught in ((PluginSuite, PLUGINS), (DeviceSuite, DEVICES)):
        checks = {name for name in vars(suite) if name.startswith("test_")}
        assert checks == set().union(*caught.values())
