"""A registry checks what it is given, and a plugin that it refuses leaves no trace."""

from types import ModuleType

import pytest
from kvdock import __version__, hookimpl
from kvdock.errors import PluginError
from kvdock.model import CORE_PARAMS, LayerParams, MHAParams
from kvdock.plugins.loading import hook_names


class Plugin:
    kvdock_contract = "0.1"

    @hookimpl
    def get_pool_cls(self, query):
        return None


class Kind(LayerParams, frozen=True, kw_only=True):
    width: int


class OtherKind(LayerParams, frozen=True, kw_only=True):
    width: int


def plugin_with(**attributes):
    return type("Custom", (Plugin,), attributes)()


def refusal(registry, plugin, name="acme", tier="hardware", **origin):
    before = registry.members
    with pytest.raises(PluginError) as caught:
        registry.add(plugin, name=name, tier=tier, **origin)
    assert registry.members == before
    assert all(m.plugin is not plugin for m, _ in registry.hookimpls("get_pool_cls", tier))
    return str(caught.value)


def test_a_fresh_registry_is_empty(registry):
    assert (registry.members, registry.problems, registry.names) == ((), (), ())
    assert registry.layer_params() == dict(CORE_PARAMS)


def test_name_and_tier_come_from_the_plugin_unless_they_are_given(registry, mock_plugin):
    registry.add(mock_plugin("acme", tier="family"))
    registry.add(mock_plugin("x", tier="family"), name="other", tier="hardware", distribution="kvdock-o", version="1.0")
    assert [(m.name, m.tier, m.origin) for m in registry.members] == [
        ("other", "hardware", "kvdock-o 1.0"),
        ("acme", "family", "no distribution"),
    ]


def test_a_module_is_a_plugin(registry):
    module = ModuleType("acme_hooks")
    module.kvdock_contract = "0.1"
    module.get_pool_cls = hookimpl(lambda query: None)
    registry.add(module, name="acme", tier="hardware")
    assert registry.members[0].module == "acme_hooks"


def test_members_of_a_tier_are_asked_by_name_whatever_the_order_of_registration(registry, mock_plugin):
    """L-05: the same order in both orders of registration."""
    for name in ("b", "c", "a"):
        registry.add(mock_plugin(name, tier="hardware", objection="no"))
    assert [m.name for m, _ in registry.hookimpls("validate_plan", "hardware")] == ["a", "b", "c"]


def test_the_core_need_not_state_a_contract(registry):
    registry.add(plugin_with(kvdock_contract=None), name="core", tier="core")
    assert [(m.name, m.origin) for m in registry.members] == [("core", f"kvdock {__version__}")]


def test_a_plugin_without_a_contract_is_refused(registry):
    text = refusal(registry, plugin_with(kvdock_contract=None), distribution="kvdock-acme", version="1.2")
    assert text == (f"plugin 'acme' (kvdock-acme 1.2) states no contract; add kvdock_contract = \"0.1\" to {__name__}")


def test_a_plugin_for_another_contract_is_refused(registry, mock_plugin):
    """L-12: a plugin built for one API on a core of another."""
    text = refusal(registry, mock_plugin("acme", tier="hardware", contract="0.2"), distribution="kvdock-acme")
    assert "was written for contract '0.2', this kvdock has '0.1'; install a release of kvdock-acme" in text


def test_a_misspelt_hook_is_refused_with_the_nearest(registry):
    """L-14"""
    text = refusal(registry, plugin_with(get_pol_cls=hookimpl(lambda self, query: None)))
    assert text.endswith("get_pol_cls is no hook of kvdock; did you mean 'get_pool_cls'?")


def test_a_hook_that_is_marked_optional_may_be_unknown(registry):
    later = hookimpl(lambda self, query: None, optionalhook=True)
    registry.add(plugin_with(a_hook_of_later=later), name="acme", tier="hardware")
    assert [m.name for m in registry.members] == ["acme"]


@pytest.mark.parametrize("mark", [{"wrapper": True}, {"hookwrapper": True}])
def test_a_wrapper_is_refused(registry, mark):
    def around(self, query):
        yield

    text = refusal(registry, plugin_with(get_pool_cls=hookimpl(around, **mark)))
    assert text.endswith("get_pool_cls is a wrapper; hooks answer for themselves, so return an answer or None")


def test_a_default_argument_is_refused(registry):
    text = refusal(registry, plugin_with(get_pool_cls=hookimpl(lambda self, query=None: None)))
    assert text.endswith("get_pool_cls: the argument 'query' has a default, which is never used; remove it")


@pytest.mark.parametrize(
    ("hook", "implementation", "asked", "given"),
    [
        ("get_pool_cls", lambda self, kind: None, "kind", "query"),
        ("get_pool_cls", lambda self, query, device: None, "device", "query"),
        ("get_pool_cls", lambda self, *args: None, "*args", "query"),
        ("get_pool_cls", lambda self, **rest: None, "**rest", "query"),
        ("device_catalogue", lambda self, query: None, "query", "no argument"),
        ("probe_device", lambda self, query: None, "query", "selector"),
        ("get_kernels", lambda self, query: None, "query", "device, options"),
    ],
)
def test_an_argument_that_the_hook_does_not_give_is_refused(registry, hook, implementation, asked, given):
    text = refusal(registry, plugin_with(**{hook: hookimpl(implementation)}))
    assert text.endswith(f"{hook} asks for '{asked}', but the hook gives {given}")


def test_an_implementation_may_leave_arguments_out(registry):
    registry.add(plugin_with(get_pool_cls=hookimpl(lambda self: None)), name="acme", tier="hardware")
    ((_, impl),) = registry.hookimpls("get_pool_cls", "hardware")
    assert tuple(impl.argnames) == ()


def test_a_plugin_without_any_hook_is_refused(registry):
    bare = type("Bare", (), {"kvdock_contract": "0.1", "get_pool_cls": lambda self, query: None})()
    text = refusal(registry, bare, distribution="kvdock-acme", version="1.0")
    assert text == ("plugin 'acme' (kvdock-acme 1.0) implements no hook; mark its functions with kvdock.hookimpl")


def test_a_class_is_refused(registry):
    assert refusal(registry, Plugin) == "plugin 'acme' is the class Plugin; register an instance"


def test_a_name_is_taken_once(registry, mock_plugin):
    """L-08: duplicate names are refused."""
    registry.add(mock_plugin("acme", tier="hardware"), distribution="kvdock-acme", version="1.2")
    text = refusal(registry, mock_plugin("acme", tier="family"), tier="family", distribution="kvdock-fork", version="3")
    assert text == (
        "the name 'acme' is taken by the hardware plugin of kvdock-acme 1.2 (kvdock.testing.mocks); "
        "rename the family plugin of kvdock-fork 3 (kvdock.testing.mocks)"
    )


@pytest.mark.parametrize("name", ["core", "cpu"])
def test_a_reserved_name_is_refused(registry, name):
    """L-08: reserved names are refused."""
    text = refusal(registry, Plugin(), name=name)
    assert text == f"the name {name!r} is reserved for a built-in plugin; rename the entry point"


@pytest.mark.parametrize("name", ["", "a b", "a=b", "a,b", "a:b", "a.b.c"])
def test_a_name_that_could_not_be_written_in_an_option_is_refused(registry, name):
    assert refusal(registry, Plugin(), name=name).startswith(f"{name!r} is no name for a plugin; use letters, digits")


def test_an_unknown_tier_is_refused(registry):
    with pytest.raises(
        PluginError, match="'vendor' is no tier of plugins; give one of core, hardware, family, variant"
    ):
        registry.add(Plugin(), name="acme", tier="vendor")


def test_an_object_has_one_name_per_tier_and_is_asked_once(registry):
    """L-16: the shared object is registered once."""
    plugin = Plugin()
    registry.add(plugin, name="acme", tier="hardware")
    registry.add(plugin, name="acme", tier="family")
    registry.add(plugin, name="alias", tier="hardware")
    assert [(m.name, m.tier, m.same_as) for m in registry.members] == [
        ("acme", "hardware", ""),
        ("alias", "hardware", "acme"),
        ("acme", "family", "acme"),
    ]
    assert [m.name for m, _ in registry.hookimpls("get_pool_cls", "hardware")] == ["acme"]
    assert registry.hookimpls("get_pool_cls", "family") == ()


def test_kinds_that_plugins_invent_are_known_by_name(registry):
    registry.add(plugin_with(layer_params={"ring": Kind}), name="rings", tier="family")
    assert registry.layer_params() == {**CORE_PARAMS, "ring": Kind}
    assert (registry.inventor("ring"), registry.inventor("mha")) == ("rings", "")


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa", "sparse_index", "state"])
def test_a_kind_of_the_core_cannot_be_redefined(registry, kind):
    text = refusal(registry, plugin_with(layer_params={kind: Kind}), tier="family")
    assert text.endswith(f"layer_params redefines the kind {kind!r}, which belongs to the core; use another name")


def test_the_core_may_define_kinds(registry):
    registry.add(plugin_with(layer_params={"wave": Kind}), name="core", tier="core")
    assert registry.layer_params()["wave"] is Kind


def test_a_kind_of_another_plugin_cannot_be_redefined(registry):
    registry.add(plugin_with(layer_params={"ring": Kind}), name="rings", tier="family")
    text = refusal(registry, plugin_with(layer_params={"ring": OtherKind}), tier="family")
    assert text.endswith("layer_params redefines the kind 'ring', which another plugin defines; use another name")


@pytest.mark.parametrize("wrong", [MHAParams(num_kv_heads=1, head_dim=1, v_head_dim=1), int, "ring"])
def test_what_is_no_shape_struct_is_refused(registry, wrong):
    text = refusal(registry, plugin_with(layer_params={"ring": wrong}), tier="family")
    assert text.endswith(f"layer_params['ring'] is {wrong!r}, which is no subclass of LayerParams")


def test_layer_params_that_are_no_mapping_are_refused(registry):
    text = refusal(registry, plugin_with(layer_params=["ring"]), tier="family")
    assert text.endswith("layer_params is ['ring']; give a mapping of layer kind to LayerParams subclass")


def test_the_contract_has_twelve_hooks():
    assert hook_names() == (
        "device_catalogue",
        "get_allocator_cls",
        "get_kernels",
        "get_option_defaults",
        "get_pool_cls",
        "get_request_pool_cls",
        "group_layers",
        "probe_device",
        "read_model",
        "size_state_pools",
        "validate_plan",
        "validate_prefill_only",
    )


def test_what_pluggy_leaves_half_registered_is_taken_out_again(registry, mock_plugin):
    """L-01: some releases of pluggy keep the name of a plugin whose registration failed."""

    class Moody(Plugin):
        looks = 0

        def __dir__(self):
            self.looks += 1
            if self.looks > 1:
                raise RuntimeError("no second look")
            return super().__dir__()

    text = refusal(registry, Moody(), distribution="kvdock-acme", version="1.0")
    assert text == "plugin 'acme' (kvdock-acme 1.0) cannot be registered: no second look"
    registry.add(mock_plugin("acme", tier="hardware"))
    assert [m.name for m in registry.members] == ["acme"]
