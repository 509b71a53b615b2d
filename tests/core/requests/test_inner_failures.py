"""Every inner call of a request's life fails once, in each form of cache: nothing changes, and the call is made again."""

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.model import ConvBlock, ConvParams, DSAParams, LayerSpec, ModelSpec, StateParams
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.failing import Life  # noqa: E402

DEVICE = DeviceInfo(device_type="cpu", name="d", total_bytes=2**50, free_before_load_bytes=2**50, free_bytes=2**50)
WAYS = ("before", "after", "operator")
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
MHA = LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
SLIDING = LayerSpec(kind="mha", params=MHA.params, window_tokens=7)
CONV = ConvParams(blocks=(ConvBlock(heads=1, head_dim=8),), kernel=4)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(1, 8, 8)))
LAYERS = {
    "dense": (MHA,),
    "sliding": (MHA, SLIDING),
    "pure": (SLIDING,),
    "linear": (MHA, STATE),
    "sliding linear": (MHA, SLIDING, STATE),
    "tiers": (DSA,),
}


def cache_of(kind, debug=True, **options):
    model = ModelSpec(name="m", architecture="M", layers=LAYERS[kind], context_length=64, dtype="bfloat16")
    options = {"page_size": 4, "max_running_requests": 4, "max_total_tokens": 192, **options}
    plan = kvdock.plan(model, device=DEVICE, options=options, budget_bytes=2**26, registry=core_only())
    return kvdock.build(plan, device="cpu", debug=debug)


def live(life, evicts, **how):
    """A prompt that grows, decodes, evicts, drafts and is retracted; a prefix that is shared; a group of releases."""
    life.admit("a", 13, **how)
    life.grow("a", 6)
    life.admit("b", 5)
    life.decode(["a", "b"], 5)
    life.retract("a", 9)
    life.evict(["a", "b"], [9, 4])
    life.grow("a", 11)
    life.trim(["a"], [26])
    prefix = life.slots("a")[:8]
    life.admit("c", 10, prefix=prefix, evicted=8 if evicts else 0)
    life.hold_prefix("c", 8)
    life.decode(["c"], 2)
    life.release("c")
    life.admit("d", 8)
    kept = life.slots("d")[:4]
    life.release("d", kept=4)
    life.release_in_a_group(["b"])
    life.release("a")
    life.cache.check(kept)
    life.attempt(lambda: life.allocator.free(kept))
    life.end()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("kind", "role"),
    [
        *(("dense", role) for role in ("none", "prefill", "decode")),
        *(("sliding", role) for role in ("none", "prefill", "decode")),
        *(("pure", role) for role in ("none", "decode")),
        ("linear", "none"),
        ("linear", "decode"),
        ("sliding linear", "none"),
    ],
)
def test_a_failed_call_changes_nothing_and_can_be_made_again(kind, role, debug, way):
    how = {"arriving": True} if role == "decode" else {}
    live(Life(cache_of(kind, debug, role=role), way), kind not in ("dense", "linear"), **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("debug", [False, True])
def test_in_tiers_too(debug, way):
    cache = cache_of("tiers", debug, hisparse=True, hisparse_top_k=4, max_total_tokens=64)
    life, allocator = Life(cache, way), cache.token_to_kv_pool_allocator
    life.admit("a", 18)
    life.attempt(lambda: allocator.reserve_host("a", 40))
    life.evict(["a"], [12])
    life.grow("a", 5)
    life.attempt(lambda: allocator.alloc_device_buffer("a", 12, 4))
    life.attempt(lambda: allocator.grow_device_buffer("a", 12))
    life.decode(["a"], 7)
    life.trim(["a"], [25])
    life.attempt(lambda: allocator.map_newest("a"))
    life.decode(["a"], 4)
    life.admit("b", 6)
    life.retract("b", 7)
    life.release_in_a_group(["a"])
    life.attempt(lambda: allocator.reserve_host("b", 8))
    life.attempt(lambda: allocator.alloc_device_buffer("b", 0))
    life.release("b")
    life.end()
