"""DeepSeek V4 on NPUs: nothing of a request is kept for another, so whoever ends gives back all that the next needs."""

import pytest
from kvdock.builder import build
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


@pytest.mark.parametrize("debug", [False, True])
def test_nothing_is_taken_for_an_owner_that_cannot_be_hashed(planned, debug):
    """In none of the six spaces, whether a request begins or goes on."""
    cache = build(planned(max_total_tokens=4096), device="cpu", debug=debug)
    allocator, nameless = cache.token_to_kv_pool_allocator, ["no", "name"]
    slots = cache.admit("a", 200)
    before, owners, last = free_slots(cache), [nameless], slots[-1:]
    begin = torch.tensor([0]), [0], torch.tensor([300]), [300], torch.tensor([-1]), 300
    go_on = torch.tensor([200]), [200], torch.tensor([700]), [700], last, 500
    for call in (
        lambda: allocator.alloc(128, nameless),
        lambda: allocator.alloc_pages(1, owners),
        lambda: allocator.alloc_extend(*begin, owners=owners),
        lambda: allocator.alloc_extend_bundle(*go_on, owners=owners),
        lambda: allocator.alloc_decode(torch.tensor([201]), [201], last, owners=owners),
        lambda: allocator.alloc_decode_bundle(torch.tensor([1]), [1], torch.tensor([-1]), owners=owners),
        lambda: allocator.release(nameless),
    ):
        with pytest.raises(SlotError, match="is no list of hashable names"):
            call()
        assert free_slots(cache) == before
    cache.release("a")
    cache.close()
