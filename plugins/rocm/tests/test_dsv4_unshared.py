"""DeepSeek V4 on AMD devices: nothing of a request is kept for another, whose rings are others."""

import pytest
from kvdock.errors import SlotError

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)


@pytest.mark.parametrize("role", ["none", "prefill"])
def test_a_request_cannot_be_kept_lent_or_taken_over(cached, role):
    cache = cached(max_total_tokens=4096, role=role)
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    everything, slots = allocator.available_size(), cache.admit("a", 600)
    before, why = allocator.available_size(), "are in the rings of its request's row; leave {} out"
    with pytest.raises(SlotError, match=rf"^request 'a': kept=512 says .* {why.format('kept')}"):
        cache.release("a", kept=512)
    with pytest.raises(SlotError, match=rf"^request 'a': borrowed=512 says .* {why.format('borrowed')}"):
        cache.hold_prefix("a", borrowed=512)
    with pytest.raises(SlotError, match=rf"^request 'b': prefix=512 says .* {why.format('prefix')}"):
        cache.admit("b", 600, prefix=slots[:512])
    assert (allocator.available_size(), table.row_of("a"), table.row_of("b")) == (before, 1, None)
    cache.release("a")
    assert allocator.available_size() == everything
    cache.close()


def test_nothing_is_taken_for_an_owner_that_cannot_be_hashed(cached):
    cache = cached(max_total_tokens=4096)
    allocator, owners, last = cache.token_to_kv_pool_allocator, [["no", "name"]], cache.admit("a", 200)[-1:]
    before = allocator.available_size()
    for call in (
        lambda: allocator.alloc_extend(
            torch.tensor([0]), [0], torch.tensor([300]), [300], torch.tensor([-1]), 300, owners=owners
        ),
        lambda: allocator.alloc_extend(
            torch.tensor([200]), [200], torch.tensor([700]), [700], last, 500, owners=owners
        ),
        lambda: allocator.alloc_decode(torch.tensor([201]), [201], last, owners=owners),
        lambda: allocator.release(owners[0]),
    ):
        with pytest.raises(SlotError, match="is no list of hashable names"):
            call()
        assert allocator.available_size() == before
