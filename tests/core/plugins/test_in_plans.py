"""What plugins say is what a plan does: options, classes and failures, from the hooks to the plan."""

import json

import kvdock
import pytest
from kvdock.builtin import BUILTINS
from kvdock.errors import PluginError, UnsupportedCombination
from kvdock.pools import MHAPool
from kvdock.testing.mocks import MOCK_DEVICE, RING_CONFIG, add_mocks


class AcmePool(MHAPool):
    pass


@pytest.fixture
def core(registry):
    for name, plugin in BUILTINS:
        registry.add(plugin, name=name, tier="core")
    return registry


@pytest.fixture
def plan(core, make_model, cpu_device):
    def make(**options):
        return kvdock.plan(make_model(), device=cpu_device, options=options, registry=core, budget_bytes=2**24)

    return make


@pytest.mark.parametrize(("options", "page_size", "source"), [({}, 512, "acme"), ({"page_size": 64}, 64, "user")])
def test_a_page_size_is_resolved_once_user_before_plugin(core, plan, mock_plugin, options, page_size, source):
    """L-15: a plugin sets page 512; nothing after it overwrites that, and the source is kept."""
    core.add(mock_plugin("acme", tier="hardware", defaults={"page_size": 512}))
    made = plan(**options)
    assert (made.options.values.page_size, made.options.sources["page_size"]) == (page_size, source)
    assert made.outline.spaces["full"].page_size == page_size
    assert made.max_total_num_tokens % page_size == 0


def test_without_a_plugin_the_default_holds(plan):
    """L-15: user > plugin > default."""
    made = plan()
    assert (made.options.values.page_size, made.options.sources["page_size"]) == (1, "default")


def test_a_pool_of_a_plugin_replaces_the_core_one_without_a_patch(core, plan, mock_plugin):
    """L-10: classes are looked up through hooks when a plan is made."""
    before = plan().groups[0].pool_cls
    core.add(mock_plugin("acme", tier="hardware", pool=lambda query: AcmePool if query.kind == "mha" else None))
    after = plan().groups[0].pool_cls
    assert (before.plugin, before.name) == ("core", "MHAPool")
    assert (after.plugin, after.name) == ("acme", "AcmePool")


def test_a_plan_of_the_mock_family_on_the_mock_hardware_needs_the_variant(core):
    add_mocks(core, variant=False)
    with pytest.raises(UnsupportedCombination, match=r"mock.ring would add it: install kvdock-mock\[ring\]"):
        kvdock.plan(RING_CONFIG, device="mock-1", registry=core, budget_bytes=2**20)
    add_mocks(core, family=False, hardware=False)
    made = kvdock.plan(RING_CONFIG, device="mock-1", registry=core, budget_bytes=2**20)
    assert made.device is MOCK_DEVICE
    assert {group.name: group.pool_cls.name for group in made.groups} == {
        "full": "MockPagedPool",
        "ring": "MockRingPool",
        "states": "MockStatePool",
    }
    assert made.spaces["ring"] == 4 * made.spaces["requests"]
    assert made.spaces["states"] == made.spaces["requests"]


def test_a_plugin_that_only_lost_a_tie_is_not_among_those_that_a_plan_file_names(core, plan, mock_plugin):
    for name, pool in [("acme", AcmePool), ("acme2", MHAPool)]:
        core.add(mock_plugin(name, tier="hardware", pool=lambda query, pool=pool: pool if query.group else None))
    made = plan(prefer=("get_pool_cls=acme",))
    assert made.groups[0].pool_cls.plugin == "acme"
    assert set(json.loads(made.to_json())["plugins"]) == {"acme", "core"}
    assert "acme2 (hardware) outranked: MHAPool, lost to prefer get_pool_cls=acme" in made.explain()


def test_a_hook_that_raises_stops_the_plan_with_its_plugin(core, plan, mock_plugin):
    core.add(mock_plugin("acme", tier="hardware", pool=lambda query: 1 // 0), distribution="kvdock-acme", version="1.2")
    with pytest.raises(PluginError, match=r"'acme' \(kvdock-acme 1.2\): get_pool_cls raised ZeroDivisionError"):
        plan()
