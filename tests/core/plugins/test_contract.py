"""The contract is written down: a hook or a field that changes is a change of the contract, and changes this file."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest
from kvdock import queries
from kvdock.hookspecs import CONTRACT, GROUPS, TIERS, KVDockSpecs
from kvdock.plugins.loading import Registry, hook_names

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
    "PlanQuery": (*COMMON, "groups", "spaces", "pools"),
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
