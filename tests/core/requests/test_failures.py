"""Calls that fail half-way, or that lie, leave nothing behind."""

import threading

import kvdock
import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def cache_of(model, budget=2**27, debug=True, parallel=None, **options):
    plan = kvdock.plan(
        f"tests/models/{model}.json",
        device="cpu",
        budget_bytes=budget,
        parallel=parallel or kvdock.Parallelism(),
        options={"page_size": 16, "context_length": 1024, **options},
    )
    return kvdock.build(plan, debug=debug)


def hybrid(**options):
    parallel = kvdock.Parallelism(tp_size=4)
    return cache_of("qwen3-next-80b-a3b", 2**29, parallel=parallel, max_state_slots=6, **options)


def failing(*arguments, **named):
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("call", ["clear", "close"])
def test_a_refused_clear_forgets_no_holding(call):
    cache = cache_of("gpt-oss-20b")
    prefix = cache.admit("a", 64)
    cache.release("a", kept=64)
    cache.admit("b", 100, prefix=prefix)
    refused = []

    def from_another_thread():
        try:
            getattr(cache, call)()
        except SlotError as error:
            refused.append(error)

    thread = threading.Thread(target=from_another_thread)
    thread.start()
    thread.join()
    assert len(refused) == 1
    cache.release("b")
    cache.check(prefix)


@pytest.mark.parametrize("role", ["none", "decode"])
@pytest.mark.parametrize("size", [4.0, True, "4"])
def test_a_count_that_is_no_whole_number_is_refused_and_takes_nothing(role, size):
    cache = cache_of("llama-3.1-8b", page_size=1, role=role)
    allocator = cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    with pytest.raises(SlotError, match="no whole numbers"):
        allocator.alloc(size)
    assert allocator.available_size() == before
    assert cache.admit("a", 10).shape == (10,)


@pytest.mark.parametrize("role", ["none", "decode"])
def test_a_count_may_be_a_tensor_and_stays_none(role):
    allocator = cache_of("llama-3.1-8b", page_size=1, role=role).token_to_kv_pool_allocator
    assert allocator.alloc(torch.tensor(4)).shape == (4,)
    assert type(allocator.available_size()) is int


def test_states_that_were_not_made_ready_are_still_due(monkeypatch):
    """H-09: a failure half-way leaves the slot on the list, so the next call clears it."""
    cache = hybrid()
    states = cache.token_to_kv_pool.states
    cache.admit("old", 8)
    cache.prepare_states()
    states.temporal_states(0)[cache.req_to_token_pool.state_of("old")] = 1
    slot = cache.req_to_token_pool.state_of("old")
    cache.release("old")
    for name in range(6):  # the slot comes round again
        cache.admit(name, 8)
        if cache.req_to_token_pool.state_of(name) == slot:
            break
        cache.release(name)
    with monkeypatch.context() as patch:
        patch.setattr(states, "clear_slots", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            cache.prepare_states()
    cache.prepare_states()
    assert not states.temporal_states(0)[slot].any()


def test_a_state_that_has_not_arrived_is_not_passed_on():
    cache = hybrid(role="decode", max_running_requests=1, decode_extra_slots=1)
    table = cache.req_to_token_pool
    cache.admit("new", 16, arriving=True)
    cache.prepare_states()
    with pytest.raises(SlotError, match="has not arrived yet; nothing was changed"):
        table.donate("new", replace=False)
    table.start(["new"])
    assert table.donate("new", replace=False)


@pytest.mark.parametrize("evicted", [64, -1])
def test_only_of_a_prefix_can_tokens_be_evicted_before(evicted):
    cache = cache_of("gpt-oss-20b")
    with pytest.raises(SlotError, match=f"evicted={evicted} is no part of its prefix of 0 tokens"):
        cache.admit("a", 100, evicted=evicted)
    cache.check(torch.tensor([], dtype=torch.int64))


def test_an_admission_that_fails_at_its_states_leaves_nothing_behind(monkeypatch):
    cache = hybrid()
    monkeypatch.setattr(cache.req_to_token_pool.states, "alloc", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        cache.admit("q", 20)
    cache.check(torch.tensor([], dtype=torch.int64), held_states=[])
    assert cache.req_to_token_pool.live_rows() == {}


def test_slot_0_of_a_tail_is_never_handed_out():
    """A-12: freeing what a tail returned gives back no padding."""
    cache = cache_of(
        "mistral-7b-v0.1", debug=False, context_length=8192, max_total_tokens=4608, page_size=16, budget=2**31
    )
    allocator = cache.token_to_kv_pool_allocator
    size = allocator.available_size()
    one = torch.tensor([32])
    slots = allocator.alloc_extend_swa_tail(one * 0, [0], one, [32], one * 0 - 1, 32, [16])
    assert slots[:16].eq(0).all()
    allocator.free(slots)
    assert allocator.available_size() == size
    assert 0 not in allocator.alloc(size).tolist()


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b"])
def test_part_of_a_page_is_refused_by_every_allocator(model):
    with pytest.raises(SlotError, match="no whole number of pages of 16 slots"):
        cache_of(model).token_to_kv_pool_allocator.alloc(17)


def test_owners_are_one_a_page():
    allocator = cache_of("llama-3.1-8b").token_to_kv_pool_allocator
    before = allocator.available_size()
    with pytest.raises(SlotError, match="1 owners for 3 pages"):
        allocator.alloc_pages(3, owners=["a"])
    assert allocator.available_size() == before


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_slots_are_integers(dtype):
    pool = cache_of("llama-3.1-8b", debug=False).token_to_kv_pool
    heads = torch.ones(2, 8, 128, dtype=torch.bfloat16)
    with pytest.raises(SlotError, match="give int64 or int32, nothing was written"):
        pool.set_kv_buffer(0, torch.ones(2, dtype=dtype), heads, heads)
    assert not pool.get_key_buffer(0).any()
