"""The last guard of a cache without KV: whatever class a plugin named, what was built keeps none."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.errors import BuildError  # noqa: E402
from kvdock.model import LayerSpec, MHAParams, ModelSpec  # noqa: E402
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.pools import MHAPool, NoOpPool  # noqa: E402
from kvdock.pools.base import BufferInfo  # noqa: E402
from kvdock.startup import core_only  # noqa: E402

DEVICE = DeviceInfo(
    device_type="cpu",
    name="small",
    total_bytes=2**24,
    free_before_load_bytes=2**24,
    free_bytes=2**24,
    capabilities=("skip_kv_cache:fa3",),
)
OPTIONS = {
    "prefill_only_disable_kv_cache": True,
    "attention_backend": "fa3",
    "is_embedding": True,
    "prefix_cache": False,
    "page_size": 4,
    "max_running_requests": 2,
}


class GreedyPool(MHAPool):
    """Says that it keeps no KV, and keeps it."""

    features = MHAPool.features | {"no_kv"}


class HoardingPool(NoOpPool):
    """Declares nothing, and makes tensors of its own."""

    def __init__(self, query, parts):
        super().__init__(query, parts)
        self._hoard = torch.zeros(16)

    def buffer_infos(self):
        nbytes = self._hoard.nbytes
        info = BufferInfo(
            name="hoard",
            role="key",
            layer_id=0,
            pointer=self._hoard.data_ptr(),
            nbytes=nbytes,
            item_nbytes=4,
            stride_nbytes=4,
        )
        return [info]


class QuietPool(NoOpPool):
    """A vendor's own pool without KV."""


def plan_with(pool, mock_plugin, heads=(2, 2), **options):
    registry = core_only()
    registry.add(mock_plugin("acme", tier="hardware", pool=lambda query: pool if query.group else None))
    layers = tuple(
        LayerSpec(kind="mha", params=MHAParams(num_kv_heads=count, head_dim=8, v_head_dim=8)) for count in heads
    )
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=64, dtype="bfloat16")
    return plan_from((model,), DEVICE, make_options(OPTIONS | options), Parallelism(), registry, budget_bytes=2**20)


def test_a_class_that_keeps_kv_in_spite_of_what_it_says_is_refused(mock_plugin):
    plan = plan_with(GreedyPool, mock_plugin)
    with pytest.raises(
        BuildError,
        match=r"needs a pool that keeps nothing, but group 'full' got GreedyPool of plugin 'acme', which keeps k, v; "
        r"leave the option out, or the plugin with no_plugins=acme",
    ):
        build(plan)


def test_memory_that_a_class_made_for_itself_is_found_too(mock_plugin):
    with pytest.raises(BuildError, match="HoardingPool of plugin 'acme', which keeps hoard"):
        build(plan_with(HoardingPool, mock_plugin))


def test_a_vendors_own_pool_without_kv_is_built(mock_plugin):
    cache = build(plan_with(QuietPool, mock_plugin))
    assert type(cache.token_to_kv_pool) is QuietPool


def test_every_pool_behind_a_router_is_looked_at(mock_plugin):
    cache = build(plan_with(QuietPool, mock_plugin, heads=(2, 4)))
    assert [type(pool) for pool in cache.pools.values()] == [QuietPool, QuietPool]
    with pytest.raises(BuildError, match="group 'full' got GreedyPool"):
        build(plan_with(GreedyPool, mock_plugin, heads=(2, 4)))


def test_a_cache_with_kv_is_not_looked_at(mock_plugin):
    cache = build(plan_with(GreedyPool, mock_plugin, prefill_only_disable_kv_cache=False))
    assert type(cache.token_to_kv_pool) is GreedyPool
