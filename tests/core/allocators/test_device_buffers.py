"""Device buffers: what they take over belongs to one request, and a call that fails half-way changes nothing."""

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

DEVICE = DeviceInfo(device_type="cpu", name="d", total_bytes=2**50, free_before_load_bytes=2**50, free_bytes=2**50)
LAYER = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))


@pytest.fixture
def cache():
    """32 device slots, 64 full and host slots, pages of 4; a buffer is 8 slots and a page of 4."""
    model = ModelSpec(name="m", architecture="M", layers=(LAYER,), context_length=64, dtype="bfloat16")
    options = {"page_size": 4, "hisparse": True, "max_running_requests": 2, "hisparse_top_k": 4, "max_total_tokens": 32}
    plan = kvdock.plan(model, device=DEVICE, options=options, budget_bytes=2**26, registry=core_only())
    return kvdock.build(plan, device="cpu", debug=True)


def state_of(cache):
    allocator = cache.token_to_kv_pool_allocator
    tables = allocator.logical_to_device, allocator.req_to_device_buffer, allocator.req_to_host
    return (allocator.device_available_size(), *(table.tolist() for table in tables))


@pytest.mark.parametrize("taker", ["a", "b"])
def test_pages_that_another_request_holds_become_nobodys_buffer(cache, taker):
    first = cache.admit("a", 8)
    cache.admit("b", 12, prefix=first)
    before = state_of(cache)
    with pytest.raises(SlotError, match=f"'{taker}' cannot take the device pages of tokens that others hold too"):
        cache.token_to_kv_pool_allocator.alloc_device_buffer(taker, 0)
    assert state_of(cache) == before
    cache.check()


def test_a_borrower_takes_what_lies_behind_the_prefix(cache):
    cache.admit("b", 12, prefix=cache.admit("a", 8))
    assert cache.token_to_kv_pool_allocator.alloc_device_buffer("b", 8).shape == (12,)
    cache.check()


@pytest.mark.parametrize("tokens", [8, 10, 22])
@pytest.mark.parametrize(
    ("part", "method"),
    [("_buffers", "add"), ("device", "free_pages"), (None, "_place_newest"), (None, "_erase")],
)
def test_a_buffer_that_fails_half_way_changes_nothing(cache, monkeypatch, tokens, part, method):
    cache.admit("a", tokens)
    allocator = cache.token_to_kv_pool_allocator
    before = state_of(cache)
    with monkeypatch.context() as patch:
        patch.setattr(allocator if part is None else getattr(allocator, part), method, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            allocator.alloc_device_buffer("a", 0)
    assert state_of(cache) == before
    assert allocator.alloc_device_buffer("a", 0).shape == (12,)
    cache.check()


@pytest.mark.parametrize("tokens", [9, 10, 11, 13])
def test_no_page_stays_mapped_to_the_newest_page_of_a_request_that_went(cache, tokens):
    cache.admit("a", tokens)
    allocator = cache.token_to_kv_pool_allocator
    allocator.alloc_device_buffer("a", 0)
    page = -(-tokens // 4) - 1
    newest = allocator.req_to_device_buffer[cache.req_to_token_pool.row_of("a"), -4:]
    own = cache.req_to_token_pool.req_to_token[cache.req_to_token_pool.row_of("a"), page * 4 : tokens].long()
    assert allocator.translate(own).tolist() == newest[: tokens - page * 4].tolist()
    cache.release("a")
    assert not allocator.logical_to_device.any()
    assert allocator.device_available_size() == 32
    cache.check()
