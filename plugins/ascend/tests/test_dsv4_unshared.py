"""DeepSeek V4 on NPUs: nothing of a request is kept for another, so whoever ends gives back all that the next needs."""

import pytest
from kvdock.errors import SlotError

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def free_slots(cache):
    allocator = cache.token_to_kv_pool_allocator
    return {name: part.available_size() for name, part in allocator.parts.allocators.items()}


def test_a_request_cannot_be_kept_lent_or_taken_over(cached):
    cache = cached(max_total_tokens=8192, max_running_requests=2)
    table, everything = cache.req_to_token_pool, free_slots(cache)
    slots, why = cache.admit("a", 600), "belong to one request; leave {} out"
    before = free_slots(cache)
    with pytest.raises(SlotError, match=rf"^request 'a': kept=512 says .* {why.format('kept')}"):
        cache.release("a", kept=512)
    with pytest.raises(SlotError, match=rf"^request 'a': borrowed=512 says .* {why.format('borrowed')}"):
        cache.hold_prefix("a", borrowed=512)
    with pytest.raises(SlotError, match=rf"^request 'b': prefix=512 says .* {why.format('prefix')}"):
        cache.admit("b", 600, prefix=slots[:512])
    assert (free_slots(cache), table.row_of("a"), table.row_of("b")) == (before, 1, None)
    cache.evict(["a"], [256])
    cache.hold_prefix("a", evicted=256)  # of its own tokens a request may say what left its window
    cache.release("a", kept=0)
    assert free_slots(cache) == everything


def test_whatever_callers_try_to_keep_the_next_request_is_admitted(cached):
    """As many requests one after the other as there are states for would have been starved by what others left."""
    cache = cached(max_total_tokens=8192, max_running_requests=2)
    for name in range(8):
        assert cache.admit(name, 600) is not None
        with pytest.raises(SlotError, match="share none"):
            cache.release(name, kept=512)
        cache.release(name)
    cache.close()
