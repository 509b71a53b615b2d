"""What acme claims, what it declines, and that the core puts its parts together."""

import kvdock
import pytest
from kvdock.builtin import BUILTINS
from kvdock.planner import plan_from
from kvdock_acme import device, hooks

FULL = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8))
SLIDING = kvdock.LayerSpec(kind="mha", params=FULL.params, window_tokens=31)
UNEVEN = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=4))
LATENT = kvdock.LayerSpec(kind="mla", params=kvdock.MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))


def make_model(*layers):
    return kvdock.ModelSpec(name="m", architecture="A", layers=layers, context_length=128, dtype="bfloat16")


def plan(*layers, profile="acme-1-mini", on=None, **options):
    registry = kvdock.Registry()
    for name, plugin in BUILTINS:
        registry.add(plugin, name=name, tier="core")
    registry.add(hooks, name="acme", tier="hardware", distribution="kvdock-acme", version="0.1.0")
    info = on or device.catalogue()[profile]
    return plan_from(
        (make_model(*layers),), info, kvdock.CacheOptions(**options), kvdock.Parallelism(), registry, budget_bytes=2**20
    )


def classes(made):
    return {group.name: (group.pool_cls.plugin, group.pool_cls.name) for group in made.groups}


def test_acme_gives_the_pool_the_allocator_and_the_page():
    made = plan(FULL, FULL)
    assert set(classes(made).values()) == {("acme", "AcmePool")}
    assert (made.allocator_cls.plugin, made.allocator_cls.name) == ("acme", "AcmeAllocator")
    assert made.options.values.page_size == 16
    assert made.options.sources["page_size"] == "acme"


def test_a_page_holds_keys_then_values():
    """16 tokens, 2 heads of 8, K and V, 2 bytes: 1,024 bytes a page and layer, and one page of padding."""
    (group,) = plan(FULL, FULL).groups
    (buffer,) = group.buffers
    pages = plan(FULL, FULL).spaces["full"] // 16
    assert buffer.shape == (pages + 1, 2, 16, 2, 8)
    assert buffer.nbytes == 2 * (pages + 1) * 1024


def test_acme_is_claimed_for_both_sides_of_a_sliding_model():
    made = plan(FULL, SLIDING, FULL, SLIDING)
    assert {group.space for group in made.groups} == {"full", "swa"}
    assert set(classes(made).values()) == {("acme", "AcmePool")}
    assert made.allocator_cls.plugin == "core"
    assert "AcmeAllocator" in made.explain()


def test_the_composite_is_built_from_parts_of_acme():
    pytest.importorskip("torch")
    made = plan(FULL, SLIDING)
    cache = kvdock.build(made, device="cpu")
    assert cache.allocated_bytes() == made.total_bytes
    assert {type(pool).__name__ for pool in cache.pools.values()} == {"AcmePool"}


@pytest.mark.parametrize("layer", [UNEVEN, LATENT], ids=["uneven", "mla"])
def test_what_acme_cannot_lay_out_stays_with_the_core(layer):
    assert {plugin for plugin, _ in classes(plan(layer)).values()} == {"core"}


def test_8_bit_keys_are_not_handed_to_a_pool_that_does_not_list_them():
    assert {plugin for plugin, _ in classes(plan(FULL, kv_cache_dtype="fp8_e4m3")).values()} == {"core"}


def test_other_devices_are_not_touched():
    other = kvdock.DeviceInfo(
        device_type="other", name="other-1", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30
    )
    made = plan(FULL, on=other)
    assert {plugin for plugin, _ in classes(made).values()} == {"core"}
    assert made.options.values.page_size == 1


def test_a_page_that_is_no_multiple_of_16_is_refused_with_advice():
    with pytest.raises(kvdock.UnsupportedCombination, match="page_size=24 is no multiple of 16; give 16, 32 or 64"):
        plan(FULL, page_size=24)


def test_profiles_say_what_is_usable_and_why():
    catalogue = device.catalogue()
    assert catalogue["acme-1"].total_bytes == 17_179_869_184
    assert catalogue["acme-1"].free_bytes == 16_106_127_360
    assert catalogue["acme-1-mini"].free_bytes == 50_331_648
    assert all("firmware" in profile.source for profile in catalogue.values())


def test_the_simulated_device_is_the_only_live_one():
    assert hooks.probe_device("sim").index == 0
    assert hooks.probe_device("") is None
    assert hooks.probe_device("0") is None
