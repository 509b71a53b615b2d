"""Choosing classes: the most specific claim that fits wins, ties are refused, and so is what nobody serves."""

import json

import msgspec
import pytest
from kvdock import __version__
from kvdock.allocators import Allocator, PagedAllocator
from kvdock.errors import PlanError, PluginError, UnsupportedCombination
from kvdock.plugins import resolve
from kvdock.plugins.loading import Problem
from kvdock.plugins.resolve import Answer, Decision
from kvdock.pools import MHAPool, Pool
from kvdock.requests import ReqToTokenPool, RequestPool


class PoolA(MHAPool):
    pass


class PoolB(MHAPool):
    pass


class AcmePool(MHAPool):
    device_types = frozenset({"acme"})
    features = frozenset({"fp8", "page_major"})


class Unfinished(Pool):
    @classmethod
    def buffers(cls, query):
        return ()


def outcomes(decision):
    return [(a.plugin, a.tier, a.outcome) for a in decision.answers]


@pytest.mark.parametrize("core_first", [True, False])
def test_a_vendor_wins_over_the_core_in_both_orders_of_registration(registry, mock_plugin, pool_query, core_first):
    """L-05: a built-in and a vendor plugin both answer; the winner is the same in both orders."""
    plugins = [mock_plugin("core", tier="core", pool=PoolA), mock_plugin("acme", tier="hardware", pool=PoolB)]
    for plugin in plugins if core_first else plugins[::-1]:
        registry.add(plugin)
    found, decision = resolve.pool_cls(registry, pool_query(device_type="acme"))
    assert found is PoolB
    assert (decision.plugin, decision.name) == ("acme", "PoolB")


def test_the_most_specific_tier_wins(registry, mock_plugin, pool_query):
    for name, tier in [("core", "core"), ("hw", "hardware"), ("fam", "family"), ("hw.fam", "variant")]:
        registry.add(mock_plugin(name, tier=tier, pool=type(f"Pool_{tier}", (MHAPool,), {})))
    found, decision = resolve.pool_cls(registry, pool_query("ring"))
    assert found.__name__ == "Pool_variant"
    assert outcomes(decision) == [("hw.fam", "variant", "claimed")]


def test_a_decision_says_who_declined_and_who_did_not_fit(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("core", tier="core", pool=PoolA))
    registry.add(mock_plugin("acme", tier="hardware", pool=AcmePool))
    registry.add(mock_plugin("other", tier="hardware", pool=lambda query: None))
    found, decision = resolve.pool_cls(registry, pool_query(device_type="cpu"))
    assert found is PoolA
    assert decision == Decision(
        hook="get_pool_cls",
        subject="the pool for group 'full' (kind mha, device cpu)",
        plugin="core",
        name="PoolA",
        answers=(
            Answer(plugin="acme", tier="hardware", outcome="unfit", detail="AcmePool runs on acme, not on cpu"),
            Answer(plugin="other", tier="hardware", outcome="declined"),
            Answer(plugin="core", tier="core", outcome="claimed", detail="PoolA"),
        ),
    )
    assert json.loads(msgspec.json.encode(decision))["answers"][1]["outcome"] == "declined"


def test_a_class_without_a_feature_that_is_asked_for_counts_as_declined(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("core", tier="core", pool=PoolA))
    registry.add(mock_plugin("acme", tier="hardware", pool=AcmePool))
    asked = frozenset({"fp8", "hisparse", "late_backing"})
    with pytest.raises(UnsupportedCombination) as caught:
        resolve.pool_cls(registry, pool_query(device_type="cpu"), asked)
    assert caught.value.objections == (
        ("acme", "unfit: AcmePool runs on acme, not on cpu and lacks hisparse, late_backing"),
        ("core", "unfit: PoolA lacks hisparse, late_backing"),
    )


def test_a_feature_that_the_core_honours_and_the_vendor_does_not_goes_to_the_core(registry, mock_plugin, pool_query):
    plain = type("Plain", (MHAPool,), {"features": frozenset()})
    registry.add(mock_plugin("core", tier="core", pool=PoolA))
    registry.add(mock_plugin("acme", tier="hardware", pool=plain))
    found, decision = resolve.pool_cls(registry, pool_query(), frozenset({"fp8"}))
    assert found is PoolA
    assert decision.answers[0].detail == "Plain lacks fp8"


def test_a_tie_names_both_and_the_line_that_settles_it(registry, mock_plugin, pool_query):
    """L-05: two external answers for one key are an error."""
    registry.add(mock_plugin("acme2", tier="hardware", pool=PoolB), distribution="kvdock-acme-fork", version="0.3")
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolA), distribution="kvdock-acme", version="1.2")
    with pytest.raises(PluginError) as caught:
        resolve.pool_cls(registry, pool_query(device_type="acme"))
    assert str(caught.value) == (
        "two plugins claim the pool for group 'full' (kind mha, device acme):\n"
        "  acme   kvdock-acme 1.2   kvdock.testing.mocks\n"
        "  acme2   kvdock-acme-fork 0.3   kvdock.testing.mocks\n"
        "Keep one: uninstall the other, or pass --prefer get_pool_cls=acme or --no-plugin acme2."
    )


def test_three_in_a_tie_are_all_named(registry, mock_plugin, pool_query):
    for name in "abc":
        registry.add(mock_plugin(name, tier="hardware", pool=type(f"Pool{name}", (MHAPool,), {})))
    with pytest.raises(
        PluginError, match=r"(?s)^3 plugins claim .* others, or .*=a or --no-plugin b and --no-plugin c"
    ):
        resolve.pool_cls(registry, pool_query())


@pytest.mark.parametrize(("line", "winner"), [("get_pool_cls=acme", PoolA), ("get_pool_cls=acme2", PoolB)])
def test_a_preference_settles_a_tie(registry, mock_plugin, pool_query, line, winner):
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolA))
    registry.add(mock_plugin("acme2", tier="hardware", pool=PoolB))
    found, _ = resolve.pool_cls(registry, pool_query(), prefer=(line,))
    assert found is winner


def test_a_preference_for_another_hook_settles_nothing(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolA, allocator=PagedAllocator))
    registry.add(mock_plugin("acme2", tier="hardware", pool=PoolB))
    with pytest.raises(PluginError, match="two plugins claim"):
        resolve.pool_cls(registry, pool_query(), prefer=("get_allocator_cls=acme",))


def test_the_loser_of_a_settled_tie_says_what_it_lost_to(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolA))
    registry.add(mock_plugin("acme2", tier="hardware", pool=PoolB))
    registry.add(mock_plugin("acme3", tier="hardware", pool=PoolA))
    registry.add(mock_plugin("acme4", tier="hardware", pool=lambda query: None))
    found, decision = resolve.pool_cls(registry, pool_query(), prefer=("get_pool_cls=acme",))
    assert (found, decision.plugin) == (PoolA, "acme")
    assert decision.answers == (
        Answer(plugin="acme", tier="hardware", outcome="claimed", detail="PoolA"),
        Answer(plugin="acme2", tier="hardware", outcome="outranked", detail="PoolB, lost to prefer get_pool_cls=acme"),
        Answer(plugin="acme3", tier="hardware", outcome="claimed", detail="PoolA"),
        Answer(plugin="acme4", tier="hardware", outcome="declined"),
    )


def test_a_preference_for_a_plugin_without_that_hook_is_an_error_that_lists_who_has_it(
    registry, mock_plugin, pool_query
):
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolA))
    registry.add(mock_plugin("acme2", tier="hardware", pool=lambda query: None, allocator=PagedAllocator))
    with pytest.raises(PlanError) as caught:
        resolve.pool_cls(registry, pool_query(), prefer=("get_allocator_cls=acme",))
    assert str(caught.value) == (
        "prefer='get_allocator_cls=acme': 'acme' does not implement get_allocator_cls; "
        "drop the line, or name one of acme2"
    )
    with pytest.raises(PlanError, match="'acme' does not implement get_kernels; drop the line: no plugin here does"):
        resolve.pool_cls(registry, pool_query(), prefer=("get_kernels=acme",))


def test_a_preference_may_use_the_second_name_of_a_plugin(registry, mock_plugin, pool_query):
    twin = mock_plugin("acme", tier="hardware", pool=PoolA)
    registry.add(twin)
    registry.add(twin, name="emca", tier="family")
    registry.add(mock_plugin("acme2", tier="hardware", pool=PoolB))
    assert resolve.pool_cls(registry, pool_query(), prefer=("get_pool_cls=emca",))[1].plugin == "acme"


def test_a_preference_does_not_lift_a_plugin_over_a_more_specific_tier(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("core", tier="core", pool=PoolA))
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolB))
    assert resolve.pool_cls(registry, pool_query(), prefer=("get_pool_cls=core",))[0] is PoolB


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "get_pol_cls=acme",
            "prefer='get_pol_cls=acme': no hook is called 'get_pol_cls'; did you mean 'get_pool_cls'?",
        ),
        (
            "get_pool_cls=acne",
            "prefer='get_pool_cls=acne': no plugin is called 'acne'; did you mean 'acme'? (found: acme)",
        ),
        ("acme", "prefer='acme' is not hook=plugin; give for example get_pool_cls=acme"),
        ("get_pool_cls=", "prefer='get_pool_cls=' is not hook=plugin; give for example get_pool_cls=acme"),
    ],
)
def test_a_preference_that_names_nothing_is_an_error(registry, mock_plugin, pool_query, line, message):
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolA))
    with pytest.raises(PlanError) as caught:
        resolve.pool_cls(registry, pool_query(), prefer=(line,))
    assert str(caught.value) == message


def test_a_preference_may_name_a_plugin_that_this_plan_does_not_load(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolA))
    registry.leave_idle("vendor")
    assert resolve.pool_cls(registry, pool_query(), prefer=("get_pool_cls=vendor",))[0] is PoolA


def test_the_same_class_twice_is_no_tie(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("b", tier="hardware", pool=PoolA))
    registry.add(mock_plugin("a", tier="hardware", pool=PoolA))
    found, decision = resolve.pool_cls(registry, pool_query())
    assert (found, decision.plugin) == (PoolA, "a")
    assert outcomes(decision) == [("a", "hardware", "claimed"), ("b", "hardware", "claimed")]


def test_a_preference_for_one_of_two_that_name_the_same_class_settles_a_tie_with_a_third(
    registry, mock_plugin, pool_query
):
    for name, pool in [("a", PoolA), ("b", PoolA), ("c", PoolB)]:
        registry.add(mock_plugin(name, tier="hardware", pool=pool))
    assert resolve.pool_cls(registry, pool_query(), prefer=("get_pool_cls=b",))[1].plugin == "b"


def test_two_claims_of_which_one_fits_are_no_tie(registry, mock_plugin, pool_query):
    registry.add(mock_plugin("acme", tier="hardware", pool=AcmePool))
    registry.add(mock_plugin("other", tier="hardware", pool=PoolB))
    assert resolve.pool_cls(registry, pool_query(device_type="cpu"))[0] is PoolB


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa", "sparse_index", "state"])
def test_a_family_may_not_claim_a_kind_of_the_core(registry, mock_plugin, pool_query, kind):
    registry.add(mock_plugin("core", tier="core", pool=PoolA))
    registry.add(mock_plugin("fam", tier="family", pool=PoolB))
    found, decision = resolve.pool_cls(registry, pool_query(kind))
    assert found is PoolA
    assert decision.answers[0] == Answer(
        plugin="fam",
        tier="family",
        outcome="refused",
        detail=f"PoolB may not serve the core's kind {kind!r}: a family claims the kinds that it invented",
    )


@pytest.mark.parametrize(("name", "tier"), [("hw", "hardware"), ("hw.fam", "variant")])
def test_hardware_and_variants_may_claim_a_kind_of_the_core(registry, mock_plugin, pool_query, name, tier):
    registry.add(mock_plugin("core", tier="core", pool=PoolA))
    registry.add(mock_plugin(name, tier=tier, pool=PoolB))
    assert resolve.pool_cls(registry, pool_query("mha"))[0] is PoolB


def test_a_family_may_not_claim_a_kind_that_another_family_invented(registry, mock_plugin, pool_query):
    from kvdock.testing.mocks import MockFamily

    registry.add(MockFamily())
    registry.add(mock_plugin("fam", tier="family", pool=PoolB))
    found, decision = resolve.pool_cls(registry, pool_query("ring"))
    assert (found.__name__, decision.plugin) == ("RingPool", "ring")
    assert decision.answers[0].detail == (
        "PoolB may not serve the kind 'ring' of ring: a family claims the kinds that it invented"
    )


def test_what_nobody_serves_is_an_error_with_every_plugin_and_its_reason(registry, mock_plugin, pool_query):
    """L-13: a kind that the only hardware plugin does not support."""
    registry.add(mock_plugin("core", tier="core", pool=lambda query: None))
    registry.add(mock_plugin("hw", tier="hardware", pool=lambda query: None), distribution="kvdock-hw", version="1.0")
    registry.add(mock_plugin("acme", tier="hardware", pool=AcmePool), distribution="kvdock-acme", version="2.0")
    with pytest.raises(UnsupportedCombination) as caught:
        resolve.pool_cls(registry, pool_query("minimax", "cuda"))
    assert str(caught.value) == (
        "no plugin offers the pool for group 'full' (kind minimax, device cuda), hook get_pool_cls:\n"
        "  acme   kvdock-acme 2.0   unfit: AcmePool runs on acme, not on cuda\n"
        "  hw   kvdock-hw 1.0   declined\n"
        f"  core   kvdock {__version__}   declined\n"
        "Install a plugin that answers it, or choose another device or options."
    )
    assert caught.value.objections == (
        ("acme", "unfit: AcmePool runs on acme, not on cuda"),
        ("hw", "declined"),
        ("core", "declined"),
    )


def test_an_empty_registry_serves_nothing_and_says_so(registry, pool_query, allocator_query, request_query):
    for ask, query, hook in [
        (resolve.pool_cls, pool_query(), "get_pool_cls"),
        (resolve.allocator_cls, allocator_query, "get_allocator_cls"),
        (resolve.request_pool_cls, request_query, "get_request_pool_cls"),
    ]:
        with pytest.raises(UnsupportedCombination, match=rf"(?s), hook {hook}:\n  nobody was asked\n"):
            ask(registry, query)


def test_a_plugin_that_failed_to_load_is_part_of_the_error(registry, pool_query):
    """L-02: the cause of a missing platform stays visible."""
    reason = "plugin 'x' (kvdock-x 1.0) failed to load from x: ImportError: libx.so"
    registry.set_aside(
        Problem(name="x", tier="hardware", distribution="kvdock-x", version="1.0", reason=reason, status="failed")
    )
    with pytest.raises(UnsupportedCombination, match=r"Not loaded: x \(kvdock-x 1.0\): .*ImportError: libx.so"):
        resolve.pool_cls(registry, pool_query())


def test_the_variant_that_would_add_it_is_suggested(registry, mock_plugin, pool_query, make_device):
    device = make_device("acme", "acme-1")
    registry.add(mock_plugin("vendor", tier="hardware", devices={"acme-1": device}), distribution="kvdock-vendor")
    registry.add(mock_plugin("fam", tier="family", pool=lambda query: None))
    with pytest.raises(UnsupportedCombination) as caught:
        resolve.pool_cls(registry, pool_query("ring", "acme", family="fam"))
    assert str(caught.value).splitlines()[-1] == ("The variant vendor.fam would add it: install kvdock-vendor[fam].")


def test_a_variant_that_is_installed_but_not_used_is_named_with_its_reason(
    registry, mock_plugin, pool_query, make_device
):
    registry.add(mock_plugin("vendor", tier="hardware", devices={"acme-1": make_device("acme")}))
    registry.set_aside(
        Problem(
            name="vendor.fam",
            tier="variant",
            distribution="kvdock-vendor",
            version="1.0",
            reason="left out by no_plugins",
            status="denied",
        )
    )
    with pytest.raises(UnsupportedCombination) as caught:
        resolve.pool_cls(registry, pool_query("ring", "acme", family="fam"))
    assert str(caught.value).splitlines()[-1] == (
        "The variant vendor.fam (kvdock-vendor 1.0) would add it, but is denied: left out by no_plugins"
    )


def test_a_query_without_a_group_may_have_no_answer(registry, mock_plugin, router_query):
    registry.add(mock_plugin("core", tier="core", pool=lambda query: None))
    found, decision = resolve.pool_cls(registry, router_query)
    assert found is None
    assert (decision.plugin, decision.name) == ("", "")
    assert decision.subject == "the pool that routes by layer (device cpu, worker target)"
    assert outcomes(decision) == [("core", "core", "declined")]


def test_a_family_may_claim_the_pool_that_routes(registry, mock_plugin, router_query):
    registry.add(mock_plugin("core", tier="core", pool=PoolA))
    registry.add(mock_plugin("fam", tier="family", pool=PoolB))
    assert resolve.pool_cls(registry, router_query)[0] is PoolB


@pytest.mark.parametrize(
    ("answer", "shown"), [(0, "0 (int)"), ("", "'' (str)"), (False, "False (bool)"), (int, "<class 'int'> (type)")]
)
def test_an_answer_that_is_no_pool_class_is_refused_by_name(registry, mock_plugin, pool_query, answer, shown):
    """L-05: a falsy answer that is not None does not win, it is refused."""
    plugin = mock_plugin("acme", tier="hardware", pool=lambda query: answer)
    registry.add(plugin, distribution="kvdock-acme", version="1.2")
    with pytest.raises(PluginError) as caught:
        resolve.pool_cls(registry, pool_query())
    assert str(caught.value) == (
        f"plugin 'acme' (kvdock-acme 1.2): get_pool_cls answered {shown}; return a subclass of kvdock's Pool or None"
    )


def test_a_class_that_lacks_methods_is_refused_with_their_names(registry, mock_plugin, pool_query):
    """L-12: a pool class that misses methods of the interface."""
    registry.add(mock_plugin("acme", tier="hardware", pool=Unfinished))
    with pytest.raises(PluginError) as caught:
        resolve.pool_cls(registry, pool_query())
    assert str(caught.value) == (
        "plugin 'acme' (no distribution): get_pool_cls answered Unfinished, which lacks buffer_infos, clear, "
        "get_cpu_copy, get_key_buffer, get_value_buffer, layer_ids, load_cpu_copy, move_kv_cache, set_kv_buffer, "
        "storages; a Pool implements all of its abstract methods"
    )


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("device_types", {"acme"}, r"device_types is \{'acme'\}; give a frozenset of names such as frozenset"),
        ("device_types", "acme", "device_types is 'acme'; give a frozenset of names"),
        ("device_types", frozenset({1}), r"device_types is frozenset\(\{1\}\); give a frozenset of names"),
        ("features", ["fp8"], r"features is \['fp8'\]; give a frozenset of names"),
        ("options", ("page_size",), r"options is \('page_size',\); give a frozenset of names"),
    ],
)
def test_a_class_that_declares_itself_wrongly_is_refused(registry, mock_plugin, pool_query, attribute, value, message):
    registry.add(mock_plugin("acme", tier="hardware", pool=type("Wrong", (MHAPool,), {attribute: value})))
    with pytest.raises(PluginError, match=f"get_pool_cls answered Wrong, whose {message}"):
        resolve.pool_cls(registry, pool_query())


def test_hook_get_allocator_cls_follows_the_same_rules(registry, mock_plugin, allocator_query):
    mine = type("Mine", (PagedAllocator,), {})
    registry.add(mock_plugin("core", tier="core", allocator=PagedAllocator))
    registry.add(mock_plugin("acme", tier="hardware", allocator=mine))
    found, decision = resolve.allocator_cls(registry, allocator_query)
    assert (found, decision.plugin) == (mine, "acme")
    assert decision.subject == "the allocator for 'full' (device cpu)"
    registry.add(mock_plugin("bad", tier="hardware", allocator=lambda query: MHAPool))
    with pytest.raises(
        PluginError, match=r"'bad' .*get_allocator_cls answered .*MHAPool.*a subclass of kvdock's Alloc"
    ):
        resolve.allocator_cls(registry, allocator_query)


def test_an_allocator_without_a_feature_is_not_chosen(registry, mock_plugin, allocator_query):
    plain = type("Plain", (PagedAllocator,), {"features": frozenset()})
    registry.add(mock_plugin("core", tier="core", allocator=plain))
    with pytest.raises(UnsupportedCombination, match=r"the allocator for 'full' .*\n.*unfit: Plain lacks dcp"):
        resolve.allocator_cls(registry, allocator_query, frozenset({"dcp"}))


def test_a_tie_of_allocators_is_settled_by_its_own_hook(registry, mock_plugin, allocator_query):
    for name in ("a", "b"):
        registry.add(mock_plugin(name, tier="hardware", allocator=type(f"Alloc_{name}", (PagedAllocator,), {})))
    with pytest.raises(PluginError, match="--prefer get_allocator_cls=a or --no-plugin b"):
        resolve.allocator_cls(registry, allocator_query)
    found, _ = resolve.allocator_cls(registry, allocator_query, prefer=("get_allocator_cls=b",))
    assert found.__name__ == "Alloc_b"
    assert issubclass(found, Allocator)


def test_hook_get_request_pool_cls_follows_the_same_rules(registry, mock_plugin, request_query):
    mine = type("Mine", (ReqToTokenPool,), {})
    registry.add(mock_plugin("core", tier="core", request_pool=ReqToTokenPool))
    registry.add(mock_plugin("fam", tier="family", request_pool=mine))
    found, decision = resolve.request_pool_cls(registry, request_query)
    assert (found, decision.subject) == (mine, "the request pool (device cpu)")
    registry.add(mock_plugin("fam2", tier="family", request_pool=type("Other", (RequestPool,), {})))
    with pytest.raises(PluginError, match=r"'fam2' .*answered Other, which lacks alloc, .*; a RequestPool implements"):
        resolve.request_pool_cls(registry, request_query)


def test_no_class_has_to_be_patched_to_be_replaced(registry, mock_plugin, pool_query):
    """L-10: a plugin's class is used everywhere because it is looked up through the hook."""
    from kvdock.pools import MHAPool as held_by_an_importer

    registry.add(mock_plugin("core", tier="core", pool=MHAPool))
    registry.add(mock_plugin("acme", tier="hardware", pool=PoolB))
    assert resolve.pool_cls(registry, pool_query())[0] is PoolB
    assert held_by_an_importer is MHAPool
