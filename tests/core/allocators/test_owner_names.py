"""An owner that cannot be hashed is refused by every allocator, in every call, before anything is taken."""

import kvdock
import pytest
from kvdock.builder import build
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.model import ConvBlock, ConvParams, DSAParams, StateParams
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)
MHA = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=1, head_dim=16, v_head_dim=16))
SLIDING = kvdock.LayerSpec(kind="mha", params=MHA.params, window_tokens=31)
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128))
CONV = ConvParams(blocks=(ConvBlock(heads=2, head_dim=16),), kernel=4)
STATE = kvdock.LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(2, 8, 16)))
CACHES = {
    "paged": ((MHA,), {}),
    "token": ((MHA,), {"page_size": 1}),
    "sorted": ((MHA,), {"role": "prefill"}),
    "both sides": ((MHA, SLIDING), {}),
    "sliding": ((SLIDING,), {}),
    "unified": ((MHA, STATE), {"unified_memory": True, "attention_backend": "triton", "prefix_cache": False}),
    "host tier": ((DSA,), {"hisparse": True, "hisparse_top_k": 64, "max_total_tokens": 1024}),
}
NAMELESS = ["no", "name"]


def one(*numbers):
    return torch.tensor(numbers)


def calls_of(cache, slots):
    """Return the calls that take an owner, each of which could be served."""
    allocator = cache.token_to_kv_pool_allocator
    page, length, last = allocator.page_size, len(slots), slots[-1:].long()
    whole, owners = [page] if page > 1 else [10], [NAMELESS]
    begin = one(0), [0], one(*whole), whole, one(-1), whole[0]
    found = {
        "alloc": lambda: allocator.alloc(page, NAMELESS),
        "alloc_pages": lambda: allocator.alloc_pages(1, owners),
        "begin": lambda: allocator.alloc_extend(*begin, owners=owners),
        "go on": lambda: allocator.alloc_extend(
            one(length), [length], one(length + 2 * page), [length + 2 * page], last, 2 * page, owners=owners
        ),
        "decode": lambda: allocator.alloc_decode(one(length + 1), [length + 1], last, owners=owners),
        "admit": lambda: cache.admit(NAMELESS, 10),
        "release": lambda: cache.release(NAMELESS),
        "hold_prefix": lambda: cache.hold_prefix(NAMELESS, evicted=0),
    }
    if hasattr(allocator, "alloc_extend_swa_tail"):
        found["tail"] = lambda: allocator.alloc_extend_swa_tail(*begin, [5], owners=owners)
    if hasattr(allocator, "alloc_logical_extend"):
        found["logical"] = lambda: allocator.alloc_logical_extend(*begin, owners=owners)
        found["reserve_host"] = lambda: allocator.reserve_host(NAMELESS, 10)
        found["host_slots"] = lambda: allocator.host_slots(NAMELESS, 0, 1)
        found["release of what is held"] = lambda: allocator.release(NAMELESS)
    return found


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_nothing_is_taken_for_an_owner_that_cannot_be_hashed(name, debug):
    layers, options = CACHES[name]
    model = kvdock.ModelSpec(name="m", architecture="A", layers=layers, context_length=256, dtype="bfloat16")
    options = {"page_size": 16, "max_running_requests": 4, **options}
    plan = kvdock.plan(model, device=CPU, options=options, budget_bytes=2**22, registry=core_only())
    cache = build(plan, device="cpu", debug=debug)
    allocator = cache.token_to_kv_pool_allocator

    def free():
        parts = [part.available_size() for part in allocator.parts.allocators.values()]
        return allocator.available_size(), cache.req_to_token_pool.available_size(), parts

    slots = cache.admit("a", 20)
    before = free()
    for what, call in calls_of(cache, slots).items():
        with pytest.raises(SlotError, match="hash"):
            print(what, call())  # shown where nothing is raised
        assert free() == before
    cache.release("a")
    cache.close()
