"""A device is a plugin's name and a name, or a bare name; two owners of one are an error that says how to choose."""

import pytest
from kvdock.errors import PlanError, PluginError
from kvdock.options import CacheOptions
from kvdock.plugins import resolve
from kvdock.plugins.loading import PluginWarning, Problem, load


@pytest.fixture
def two_vendors(registry, mock_plugin, make_device):
    """Two hardware plugins, each with a profile of its own and one that both list."""
    for plugin, own in [("red", "red-1"), ("blue", "blue-1")]:
        devices = {own: make_device(f"{plugin}_type", own), "both": make_device(f"{plugin}_type", "both")}
        live = make_device(f"{plugin}_type", f"live {plugin}", index=0)
        registry.add(mock_plugin(plugin, tier="hardware", devices=devices, live=_only_0(live)))
    return registry


def _only_0(live):
    return lambda selector: live if selector in ("", "0") else None


def test_hook_device_catalogue_lists_profiles_by_bare_name(two_vendors):
    found = resolve.catalogue(two_vendors)
    assert {name: [plugin for plugin, _ in pairs] for name, pairs in found.items()} == {
        "blue-1": ["blue"],
        "both": ["blue", "red"],
        "red-1": ["red"],
    }


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("red-1", "red-1"),
        ("red:red-1", "red-1"),
        ("red:both", "both"),
        ("red:0", "live red"),
        ("red", "live red"),
        ("red_type:0", "live red"),
        ("blue_type", "live blue"),
    ],
)
def test_a_device_is_found_by_plugin_by_name_and_by_device_type(two_vendors, selector, name):
    found = resolve.find_device(two_vendors, selector)
    assert found.name == name
    assert found.device_type == ("blue_type" if "blue" in selector else "red_type")


def test_a_bare_name_with_two_owners_is_an_error_that_says_how_to_choose(two_vendors):
    """L-08: the error lists the candidates and how to select one."""
    with pytest.raises(PlanError) as caught:
        resolve.find_device(two_vendors, "both")
    assert str(caught.value) == (
        "device 'both' is a name of two plugins, blue and red; choose with device=blue:both or red:both"
    )


def test_two_plugins_that_find_a_live_device_are_an_error_that_says_how_to_choose(two_vendors):
    """L-08: two platforms detected at once; explicit selection wins."""
    with pytest.raises(PlanError) as caught:
        resolve.probe(two_vendors, None)
    assert str(caught.value) == (
        "2 plugins find a live device (live blue of blue, live red of red); choose with device=blue:0 or device=red:0"
    )
    assert resolve.probe(two_vendors, "red").name == "live red"


def test_hook_probe_device_gives_the_only_live_device_or_none(registry, mock_plugin, make_device):
    live = make_device("red_type", "live red")
    registry.add(mock_plugin("cpu", tier="core", live=make_device("cpu", "the host")))
    assert resolve.probe(registry, None) is None
    registry.add(mock_plugin("red", tier="hardware", live=_only_0(live)))
    assert resolve.probe(registry, None) is live
    assert resolve.probe(registry, "cpu").name == "the host"
    assert resolve.probe(registry, "red", "7") is None


def test_an_unknown_device_is_an_error_with_the_nearest_and_the_list(two_vendors):
    """L-08"""
    with pytest.raises(PlanError) as caught:
        resolve.find_device(two_vendors, "rde-1")
    assert str(caught.value) == (
        "no device is called 'rde-1'; did you mean 'red-1'? (known: blue, blue-1, both, red, red-1)"
    )


def test_a_device_that_is_not_here_is_an_error_with_what_the_plugin_lists(two_vendors):
    with pytest.raises(PlanError) as caught:
        resolve.find_device(two_vendors, "red:red-2")
    assert str(caught.value) == ("device 'red:red-2' is not here (plugin 'red' lists red:both, red:red-1)")


def test_a_device_of_a_plugin_that_failed_says_why(registry):
    """L-02: no silent fallback to another device."""
    registry.set_aside(
        Problem(name="red", tier="hardware", distribution="d", version="1", reason="no driver", status="failed")
    )
    with pytest.raises(PlanError, match="no device is called 'red:0'; red is not loaded: no driver"):
        resolve.find_device(registry, "red:0")


def test_an_unknown_device_names_the_hardware_that_was_left_out(site, mock_plugin, make_device):
    core = mock_plugin("cpu", tier="core", live=make_device("cpu", "the host"))
    registry = load(site("good", "family"), deny=("zz_good", "fam"), builtins=[("cpu", core)])
    with pytest.raises(PlanError) as caught:
        resolve.find_device(registry, "good-1")
    assert str(caught.value).endswith("; not asked for its devices: zz_good (kvdock-good 1.2): left out by no_plugins")
    assert "fam" not in str(caught.value)
    registry = load(site("good"), allow=(), builtins=[("cpu", core)])
    with pytest.raises(PlanError) as caught:
        resolve.find_device(registry, "good-1")
    assert str(caught.value) == (
        "no device is called 'good-1' (known: cpu); not asked for its devices: "
        "zz_good (kvdock-good 1.2): plugins is empty, which leaves the core alone; add zz_good"
    )


def test_a_device_type_of_two_plugins_is_an_error_that_says_how_to_choose(registry, mock_plugin, make_device):
    for plugin in ("red", "blue"):
        registry.add(mock_plugin(plugin, tier="hardware", devices={f"{plugin}-1": make_device("shared", plugin)}))
    with pytest.raises(PlanError) as caught:
        resolve.find_device(registry, "shared:0")
    assert str(caught.value) == ("device type 'shared' belongs to blue and red; choose with device=blue:0 or red:0")


def test_a_device_of_the_host_is_probed(registry, mock_plugin, make_device):
    registry.add(mock_plugin("cpu", tier="core", live=make_device("cpu", "the host")))
    assert resolve.find_device(registry, "cpu").name == "the host"


def test_probing_an_unknown_plugin_is_an_error(two_vendors):
    with pytest.raises(PlanError, match=r"no plugin is called 'rad'; did you mean 'red'\? \(loaded: blue, red\)"):
        resolve.probe(two_vendors, "rad")


def test_a_probe_that_fails_is_an_error_when_the_device_was_named(site):
    """L-02: a platform that was asked for and fails is an error."""
    registry = load(site("raising"))
    with pytest.raises(PluginError) as caught:
        resolve.find_device(registry, "raising:0")
    assert str(caught.value) == (
        "plugin 'raising' (kvdock-raising 0.7): probe_device raised RuntimeError: driver version is too old; "
        "report it to its authors, or leave it out with --no-plugin raising"
    )


def test_a_probe_that_fails_is_a_warning_when_devices_are_looked_for(site, mock_plugin, make_device):
    """L-02: auto-detection that fails is a visible warning with the cause."""
    registry = load(site("raising"))
    registry.add(mock_plugin("red", tier="hardware", live=make_device("red_type", "live red")))
    with pytest.warns(PluginWarning, match=r"probe_device raised RuntimeError: driver version is too old; .* left out"):
        found = resolve.live_devices(registry)
    assert [(plugin, info.name) for plugin, info in found] == [("red", "live red")]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["red-1"], r"device_catalogue answered \['red-1'\] \(list\); return a mapping of name to DeviceInfo or None"),
        ({"red:1": None}, "device_catalogue lists a device called 'red:1'; a name is text without ':'"),
        ({7: None}, "device_catalogue lists a device called 7; a name is text without ':'"),
        ({"red-1": 80}, r"device_catalogue\['red-1'\] answered 80 \(int\); return a DeviceInfo or None"),
    ],
)
def test_a_catalogue_of_anything_else_is_refused_by_name(registry, mock_plugin, devices, message):
    registry.add(mock_plugin("red", tier="hardware", devices=lambda: devices))
    with pytest.raises(PluginError, match=rf"^plugin 'red' \(no distribution\): {message}$"):
        resolve.catalogue(registry)


def test_a_probe_of_anything_else_is_refused_by_name(registry, mock_plugin):
    registry.add(mock_plugin("red", tier="hardware", live=lambda selector: "red-1"))
    with pytest.raises(PluginError, match=r"probe_device answered 'red-1' \(str\); return a DeviceInfo or None"):
        resolve.probe(registry, "red")


def test_hook_get_kernels_gives_the_kernel_set_of_the_most_specific_tier(registry, mock_plugin, make_device):
    pytest.importorskip("torch")
    from kvdock.kernels.reference import ReferenceKernels

    mine, device = ReferenceKernels(), make_device("red_type")
    assert resolve.kernels(registry, device) is None
    registry.add(mock_plugin("red", tier="hardware", kernels=lambda d: mine if d.device_type == "red_type" else None))
    assert resolve.kernels(registry, device) is mine
    assert resolve.kernels(registry, make_device("cpu")) is None
    registry.add(mock_plugin("rival", tier="hardware", kernels=ReferenceKernels()))
    with pytest.raises(PluginError, match="two plugins claim the kernels for device 'red_type-1'"):
        resolve.kernels(registry, device)
    assert resolve.kernels(registry, device, CacheOptions(prefer=("get_kernels=red",))) is mine


def test_what_is_no_kernel_set_is_refused(registry, mock_plugin, make_device):
    registry.add(mock_plugin("red", tier="hardware", kernels=lambda device: "triton"))
    with pytest.raises(PluginError, match=r"get_kernels answered 'triton' \(str\); return a kernel set"):
        resolve.kernels(registry, make_device())
