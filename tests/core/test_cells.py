"""A plugin's pool beside the core's of the same kind: rows of another shape are seen in the plan."""

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.pools import MHAPool, MLAPool
from kvdock.pools.mha import kv_buffer
from kvdock.startup import core_only
from kvdock.testing.mocks import mock_plugin

GIB = 2**30
IDLE = DeviceInfo(device_type="cpu", name="idle", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
MLA = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
MHA = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128))


def wide(columns):
    """Return a pool for latents whose rows have so many columns."""

    class WidePool(MLAPool):
        @classmethod
        def buffers(cls, query):
            return (kv_buffer(query, "kv", "latent", (1, columns)),)

    return WidePool


class HeadsPool(MLAPool):
    """Latents as keys and values of 12 heads of 280 columns."""

    @classmethod
    def buffers(cls, query):
        return (kv_buffer(query, "k", "key", (12, 280)), kv_buffer(query, "v", "value", (12, 280)))


def plan(pool, layer=MLA, count=23, **options):
    registry = core_only()
    registry.add(mock_plugin("wrong", tier="hardware", pool=lambda query: pool if query.group else None))
    model = ModelSpec(name="m", architecture="A", layers=(layer,) * count, context_length=4096, dtype="bfloat16")
    return kvdock.plan(model, device=IDLE, options=options, budget_bytes=GIB, registry=registry)


def cell_warnings(made):
    return [warning for warning in made.warnings if "bytes a slot" in warning]


def test_latents_kept_as_heads_are_seen_in_the_plan():
    # P-14: 23 layers · 12 heads · (280 + 280) columns · 2 bytes = 309,120; 23 · (512 + 64) · 2 = 26,496
    (warning,) = cell_warnings(plan(HeadsPool))
    assert warning == (
        "group 'full' (kind mla): HeadsPool of plugin 'wrong' takes 309,120 bytes a slot, 11.7 times the 26,496 of "
        "MLAPool; its rows look like those of another kind, so ask its authors, or plan with no_plugins=wrong"
    )


def test_strict_planning_refuses_such_rows():
    with pytest.raises(kvdock.PlanError, match=r"strict planning refuses warnings: .*309,120 bytes a slot"):
        plan(HeadsPool, strict=True)


@pytest.mark.parametrize(("columns", "count"), [(576, 0), (1152, 0), (1153, 1)])
def test_twice_the_bytes_are_no_mistake(columns, count):
    assert len(cell_warnings(plan(wide(columns)))) == count


def test_a_row_that_the_core_cannot_keep_is_compared_with_nothing():
    """Scaled rows of 100 latent columns, no whole number of blocks of 128."""
    odd = LayerSpec(kind="dsa", params=kvdock.model.DSAParams(kv_lora_rank=100, qk_rope_head_dim=8, index_head_dim=128))

    class OddPool(MLAPool):
        @classmethod
        def buffers(cls, query):
            return (kv_buffer(query, "kv", "latent", (1, 5000)),)

    assert cell_warnings(plan(OddPool, odd, kv_cache_dtype="fp8_e4m3")) == []


def test_the_cores_own_pools_are_compared_with_nothing():
    assert cell_warnings(plan(None, MHA)) == []


def test_bytes_that_a_class_does_not_declare_stop_the_build():
    # P-14: built bytes are declared bytes
    torch = pytest.importorskip("torch")

    class HoardingPool(MHAPool):
        def __init__(self, query, parts):
            super().__init__(query, parts)
            self.beside = torch.zeros(1234, dtype=torch.uint8)

        def storages(self):
            return [*super().storages(), self.beside]

    made = plan(HoardingPool, MHA, count=2)
    with pytest.raises(kvdock.BuildError) as caught:
        kvdock.build(made)
    assert str(caught.value) == (
        "group 'full': HoardingPool of plugin 'wrong' holds 1,234 bytes that its buffers do not declare; declare every "
        "tensor, and take it from Parts"
    )
