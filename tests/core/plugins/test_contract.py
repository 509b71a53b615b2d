"""The contract is written down: a hook or a field that changes is a change of the contract, and changes this file."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest
from kvdock import DeviceInfo, LayerSpec, MHAParams, ModelSpec, UnsupportedCombination, plan, queries
from kvdock.hookspecs import CONTRACT, GROUPS, TIERS, KVDockSpecs
from kvdock.plugins.loading import Registry, hook_names
from kvdock.startup import core_only

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "hooks.md"
COMMON = ("model", "options", "parallel", "device", "worker")

HOOKS = {
    "device_catalogue": (),
    "get_allocator_cls": ("query: AllocatorQuery",),
    "get_kernels": ("device: DeviceInfo", "options: CacheOptions"),
    "get_option_defaults": ("query: OptionsQuery",),
    "get_pool_cls": ("query: PoolQuery",),
    "get_request_pool_cls": ("query: RequestQuery",),
    "group_layers": ("query: GroupQuery",),
    "probe_device": ("selector: str",),
    "read_model": ("query: ModelQuery",),
    "size_state_pools": ("query: StateQuery",),
    "validate_plan": ("query: PlanQuery",),
    "validate_prefill_only": ("query: PlanQuery",),
}
"""Contract 0.1: every hook with its arguments."""

QUERIES = {
    "ModelQuery": ("config", "role", "name"),
    "OptionsQuery": ("model", "options", "parallel", "device"),
    "GroupQuery": (*COMMON, "layers", "target"),
    "StateQuery": (*COMMON, "groups", "all_groups"),
    "PoolQuery": (*COMMON, "kind", "group", "spaces", "groups"),
    "AllocatorQuery": (*COMMON, "spaces", "groups", "inner"),
    "RequestQuery": (*COMMON, "spaces", "groups", "columns"),
    "PlanQuery": (*COMMON, "groups", "spaces", "pools", "buffers", "loaded"),
}
"""Contract 0.1: every query with its fields."""


def arguments(hook):
    parameters = list(inspect.signature(getattr(KVDockSpecs, hook)).parameters.values())[1:]
    return tuple(f"{p.name}: {p.annotation}" for p in parameters)


def test_the_hooks_are_those_of_the_contract():
    assert CONTRACT == "0.1"
    assert {hook: arguments(hook) for hook in hook_names()} == HOOKS


def test_the_queries_have_the_fields_of_the_contract():
    assert {name: getattr(queries, name).__struct_fields__ for name in QUERIES} == QUERIES


def test_queries_are_frozen_structs():
    for name in QUERIES:
        assert getattr(queries, name).__struct_config__.frozen


def test_every_group_has_a_tier_and_the_core_has_none():
    assert TIERS == ("core", "hardware", "family", "variant")
    assert list(GROUPS.values()) == ["hardware", "family", "variant"]


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_a_hook_says_what_none_means_shows_an_example_and_its_history(hook):
    text = inspect.getdoc(getattr(KVDockSpecs, hook))
    assert text.splitlines()[0].endswith(".")
    assert "Called" in text
    assert "\nExample:\n" in text
    assert re.search(r"\nContract: 0\.1 added\.$", text.strip())


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_the_example_of_a_hook_is_a_plugin_that_registers(hook):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(KVDockSpecs, hook)))
    namespace = {}
    for example in examples:
        exec(example.source, namespace)
    (plugin,) = [value for name, value in namespace.items() if inspect.isclass(value) and hasattr(value, hook)]
    registry = Registry()
    registry.add(plugin(), name="example", tier="hardware")
    assert registry.hooks_of(registry.members[0]) == (hook,)


ACME = DeviceInfo(device_type="acme", name="acme-1", total_bytes=2**34, free_before_load_bytes=2**34, free_bytes=2**34)
CPU = DeviceInfo(device_type="cpu", name="a cpu", total_bytes=2**34, free_before_load_bytes=2**34, free_bytes=2**34)
LAYER = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8))
LLAMA = ModelSpec(name="m", architecture="A", layers=(LAYER,) * 2, context_length=128, dtype="bfloat16")


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_the_example_of_a_hook_leaves_what_is_not_its_own(hook):
    """A plugin copied from it must not claim the pool of every device, nor object to every plan."""
    without = plan(LLAMA, device=CPU, budget_bytes=2**24, registry=core_only())
    made = plan(LLAMA, device=CPU, budget_bytes=2**24, registry=with_example(hook))
    assert made.to_json() == without.to_json()


@pytest.mark.parametrize(
    ("hook", "claimed"),
    [("get_pool_cls", "AcmePool"), ("get_allocator_cls", "AcmeAllocator"), ("get_option_defaults", "64")],
)
def test_the_example_of_a_hook_serves_its_own_device(hook, claimed):
    made = plan(LLAMA, device=ACME, budget_bytes=2**24, registry=with_example(hook))
    decisions = {decision.hook: decision for decision in made.outline.decisions if decision.plugin == "example"}
    assert {name: decision.name for name, decision in decisions.items()} == {hook: claimed}


def test_the_example_of_an_objection_is_raised_on_its_own_device():
    with pytest.raises(UnsupportedCombination, match="example: page_size=1 is no multiple of 16; give 16 or 64"):
        plan(LLAMA, device=ACME, budget_bytes=2**24, registry=with_example("validate_plan"))
    made = plan(
        LLAMA, device=ACME, budget_bytes=2**24, registry=with_example("validate_plan"), options={"page_size": 16}
    )
    assert made.options.values.page_size == 16


def with_example(hook):
    """Return a registry of the core and the plugin of a hook's example."""
    namespace = {}
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(getattr(KVDockSpecs, hook))):
        exec(example.source, namespace)
    (plugin,) = [value for value in namespace.values() if inspect.isclass(value) and hasattr(value, hook)]
    registry = core_only()
    tier = "family" if plugin.__name__.endswith("Family") else "hardware"
    registry.add(plugin(), name="example", tier=tier, distribution="example", version="1.0")
    return registry


def test_the_page_has_a_heading_and_an_include_for_every_hook():
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    included = re.findall(r"hookspecs\.py#KVDockSpecs\.(\w+)\)$", text, re.MULTILINE)
    defined = [node.name for node in _spec_class().body if isinstance(node, ast.FunctionDef)]
    assert headings == included == defined
    assert sorted(headings) == sorted(HOOKS)


def test_the_page_says_what_changed_in_each_version():
    text = PAGE.read_text(encoding="utf-8")
    assert re.search(rf"^\| {re.escape(CONTRACT)} \|", text, re.MULTILINE)


def _spec_class():
    tree = ast.parse(Path(inspect.getfile(KVDockSpecs)).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVDockSpecs")
