"""Calls that fail half-way, or that lie, leave nothing behind."""

import threading

import kvdock
import pytest
from kvdock.errors import SlotError
from kvdock.model import DSAParams

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


def once(monkeypatch, part, name):
    """Let the next call of a method of `part` fail before it does anything."""
    real = getattr(part, name)

    def fail(*arguments, **named):
        monkeypatch.setattr(part, name, real)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(part, name, fail)


def late(monkeypatch, part, name):
    """Let the next call of a method of `part` fail after it did everything."""
    real = getattr(part, name)

    def fail(*arguments, **named):
        monkeypatch.setattr(part, name, real)
        real(*arguments, **named)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(part, name, fail)


BREAKS = {
    "sliding pages": lambda cache: (cache.token_to_kv_pool_allocator.swa, "free_pages"),
    "full pages": lambda cache: (cache.token_to_kv_pool_allocator.full, "free_pages"),
    "the map": lambda cache: (cache.token_to_kv_pool_allocator, "_erase"),
    "the row": lambda cache: (cache.req_to_token_pool, "free"),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kept", [0, 32])
@pytest.mark.parametrize("place", BREAKS)
def test_a_release_that_failed_half_way_can_be_made_again(monkeypatch, place, kept, debug):
    cache = cache_of("gpt-oss-20b", debug=debug)
    allocator = cache.token_to_kv_pool_allocator
    sides = allocator.full, allocator.swa
    before = [side.available_size() for side in sides]
    prefix = cache.admit("first", 32)
    cache.release("first", kept=32)
    cache.admit("a", 300, prefix=prefix)
    cache.evict(["a"], [100])
    other = cache.admit("other", 50)
    once(monkeypatch, *BREAKS[place](cache))
    with pytest.raises(RuntimeError, match="the device is gone"):
        cache.release("a", kept=kept)
    assert cache.req_to_token_pool.row_of("a") is not None
    cache.release("a", kept=kept)
    cache.release("a", kept=kept)
    assert [side.available_size() for side in sides] == [size - 32 - 64 for size in before]
    cache.check(torch.cat((prefix, other)))
    again = cache.admit("next", 300)
    cache.release("next")
    cache.release("other")
    cache.check(prefix)
    assert len(again) == 300


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("how", ["free", "free_pages", "free_rows"])
@pytest.mark.parametrize("side", ["full", "swa"])
def test_an_allocator_frees_the_rest_after_a_side_failed(monkeypatch, side, how, debug):
    allocator = cache_of("gpt-oss-20b", debug=debug).token_to_kv_pool_allocator
    sides = allocator.full, allocator.swa
    before = [side.available_size() for side in sides]
    slots = allocator.alloc(64)
    kept = allocator.alloc(16)
    arguments = {"free": (slots,), "free_pages": (slots[::16] // 16,), "free_rows": (slots.view(1, 64), [0], [0], [64])}
    once(monkeypatch, getattr(allocator, side), "free_pages")
    with pytest.raises(RuntimeError, match="the device is gone"):
        getattr(allocator, how)(*arguments[how])
    getattr(allocator, how)(*arguments[how])
    assert [side.available_size() for side in sides] == [size - 16 for size in before]
    allocator.check(kept)
    again = allocator.alloc(128)
    assert 0 not in allocator.translate(again).tolist()
    allocator.free(again)
    allocator.check(kept)


def test_an_eviction_that_failed_can_be_made_again(monkeypatch):
    cache = cache_of("gpt-oss-20b")
    before = cache.token_to_kv_pool_allocator.swa_available_size()
    slots = cache.admit("a", 300)
    once(monkeypatch, cache.token_to_kv_pool_allocator.swa, "free_pages")
    with pytest.raises(RuntimeError, match="the device is gone"):
        cache.evict(["a"], [100])
    cache.check(slots)
    cache.evict(["a"], [100])
    assert cache.token_to_kv_pool_allocator.swa_available_size() == before - 304 + 96
    cache.check(slots)


@pytest.mark.parametrize("role", ["none", "decode"])
@pytest.mark.parametrize(
    ("fail", "place"),
    [
        (once, lambda cache: (cache.req_to_token_pool, "free")),
        (late, lambda cache: (cache.req_to_token_pool, "free")),
        (once, lambda cache: (cache.req_to_token_pool.states, "free")),
    ],
)
def test_a_release_that_failed_at_its_row_or_states_can_be_made_again(monkeypatch, place, fail, role):
    cache = hybrid(role=role)
    table = cache.req_to_token_pool
    before = cache.token_to_kv_pool_allocator.available_size(), table.available_size(), table.available_states()
    cache.admit("q", 40)
    fail(monkeypatch, *place(cache))
    with pytest.raises(RuntimeError, match="the device is gone"):
        cache.release("q")
    cache.release("q")
    cache.release("q")
    assert (
        cache.token_to_kv_pool_allocator.available_size(),
        table.available_size(),
        table.available_states(),
    ) == before
    cache.check(torch.tensor([], dtype=torch.int64), held_states=[])


def test_a_request_whose_state_slot_is_gone_keeps_its_row():
    """What the states refuse is refused before the row goes back."""
    cache = hybrid()
    table = cache.req_to_token_pool
    slots = cache.admit("q", 40)
    slot = table.state_of("q")
    table.states.free([slot])
    with pytest.raises(SlotError, match=rf"slots \[{slot}\] \(of request 'q'\) are freed twice"):
        table.free("q")
    assert table.row_of("q") == 1
    assert table.req_to_token[1, :40].tolist() == slots.tolist()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("fail", "place"),
    [
        (once, lambda cache: (cache.token_to_kv_pool_allocator, "release")),
        (late, lambda cache: (cache.token_to_kv_pool_allocator, "release")),
        (once, lambda cache: (cache.token_to_kv_pool_allocator.host, "free_pages")),
        (once, lambda cache: (cache.req_to_token_pool, "free")),
        (late, lambda cache: (cache.req_to_token_pool, "free")),
    ],
)
def test_a_release_that_failed_in_a_tier_can_be_made_again(monkeypatch, place, fail, debug):
    layer = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
    model = kvdock.ModelSpec(name="m", architecture="M", layers=(layer,), context_length=64, dtype="bfloat16")
    options = {"page_size": 4, "hisparse": True, "max_running_requests": 2, "hisparse_top_k": 4, "max_total_tokens": 32}
    cache = kvdock.build(kvdock.plan(model, device="cpu", budget_bytes=2**27, options=options), debug=debug)
    allocator = cache.token_to_kv_pool_allocator
    tiers = allocator.full, allocator.device, allocator.host
    before = [tier.available_size() for tier in tiers]
    cache.admit("a", 18)
    allocator.reserve_host("a", 20)
    other = cache.admit("b", 8)
    fail(monkeypatch, *place(cache))
    with pytest.raises(RuntimeError, match="the device is gone"):
        cache.release("a")
    cache.release("a")
    cache.release("a")
    assert [tier.available_size() for tier in tiers] == [before[0] - 8, before[1] - 8, before[2]]
    cache.check(other)


def test_copies_that_were_done_are_not_done_again(monkeypatch):
    """A slot that is a source and then a target: the second call clears what is left and copies nothing twice."""
    cache = hybrid()
    states, table = cache.token_to_kv_pool.states, cache.req_to_token_pool
    cache.admit("a", 8)
    cache.prepare_states()
    states.temporal_states(0)[table.state_of("a")] = 5
    donated = table.donate("a", replace=False)
    cache.release("a")
    cache.admit("b", 4, cached_state=donated)
    cache.admit("f", 4)  # its slot is cleared
    with monkeypatch.context() as patch:
        patch.setattr(states, "clear_slots", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            cache.prepare_states()
    states.temporal_states(0)[donated] = 9  # the slot that was read has another state by now
    cache.prepare_states()
    assert (states.temporal_states(0)[table.state_of("b")] == 5).all()
    assert not states.temporal_states(0)[table.state_of("f")].any()


def test_a_trim_that_fails_gives_nothing_back_and_can_be_tried_again(monkeypatch):
    cache = cache_of("llama-3.1-8b", page_size=16)
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    free = allocator.available_size()
    cache.admit("a", 64)
    for owner, name in ((table, "truncate"), (allocator, "free_rows")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.raises(RuntimeError, match="the device is gone"):
                cache.trim(["a"], [10])
        assert (int(table.lengths[table.row_of("a")]), allocator.available_size()) == (64, free - 64)
    assert cache.trim(["a"], [10]) == 48
    cache.admit("b", 48)
    cache.release("b")
    cache.release("a")
    assert allocator.available_size() == free


def test_an_arrival_gives_up_nothing_of_a_prefix_that_reaches_into_its_window():
    """Its tail begins at 160 of 300 tokens, inside the prefix, so the owner goes on sliding after it alone."""
    cache = cache_of("gpt-oss-20b", role="decode", max_running_requests=2)
    slots = cache.admit("owner", 320)
    cache.admit("other", 300, prefix=slots[:256], arriving=True)
    with pytest.raises(SlotError, match="'other'"):
        cache.evict(["owner"], [160])
    cache.evict(["other"], [160])
    cache.evict(["owner"], [160])
    cache.release("other")
    cache.release("owner")
    cache.check(torch.tensor([], dtype=torch.int64))
