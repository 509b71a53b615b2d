"""Admission, states before a forward pass, trimming and release, over a whole cache: all or nothing, and nothing left."""

import pytest
from kvdock.errors import SlotError
from kvdock.model import LayerSpec, MHAParams

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

NOTHING = torch.zeros(0, dtype=torch.int64)
TRACKED = {"state_extra_buffer": "on"}


def free(cache):
    """Free token slots, rows and state slots."""
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    parts = allocator.parts.allocators or {"full": allocator}
    states = getattr(table, "states", None)
    counts = [part.available_size() for part in parts.values()]
    return (*counts, table.available_size(), None if states is None else states.available_size())


def states(cache):
    return cache.pools["state"]


def extend(cache, request, tokens):
    """Give a request `tokens` more tokens and return their slots."""
    table = cache.req_to_token_pool
    row = table.row_of(request)
    start = int(table.lengths[row])
    last = table.req_to_token[row, start - 1 : start].long()
    lens = torch.tensor([start]), [start], torch.tensor([start + tokens]), [start + tokens]
    slots = cache.token_to_kv_pool_allocator.alloc_extend(*lens, last, tokens)
    table.write([row], [start], [start + tokens], slots)
    return slots


@pytest.mark.parametrize("model", ["mha", "hybrid", "sliding"])
def test_an_admission_takes_everything_and_a_release_gives_it_back(make_cache, model):
    cache = make_cache(model, max_running_requests=4)
    before = free(cache)
    slots = cache.admit("a", 10)
    table = cache.req_to_token_pool
    row = table.row_of("a")
    assert (slots.shape, slots.dtype, int(table.lengths[row])) == ((10,), torch.int64, 10)
    assert table.req_to_token[row, :10].tolist() == slots.tolist()
    assert free(cache)[0] == before[0] - 12
    cache.check(held=slots)
    cache.release("a")
    cache.release("a")
    assert free(cache) == before
    cache.close()


def test_with_states_a_request_has_three_slots_and_tokens(make_cache):
    cache = make_cache("hybrid", **TRACKED)
    tokens, rows, slots = free(cache)
    cache.admit("a", 10)
    assert free(cache) == (tokens - 12, rows - 1, slots - 3)
    assert slots == 4 * 5


@pytest.mark.parametrize("lacking", ["tokens", "rows", "states"])
def test_an_admission_that_lacks_something_takes_nothing(make_cache, lacking):
    """H-08: admit → fail → release, whatever is missing."""
    options = {
        "tokens": {"max_total_tokens": 16},
        "rows": {"max_running_requests": 1, "max_state_slots": 20},
        "states": {"max_running_requests": 4, "max_state_slots": 5},
    }[lacking]
    cache = make_cache("hybrid", **(TRACKED | options))
    table = cache.req_to_token_pool
    if lacking == "states":
        table.states.alloc(["someone else"] * 3)
    else:
        assert cache.admit("a", 8) is not None
    before, generation, maps = free(cache), table.generation.tolist(), table.row_to_state.tolist()
    mark = cache.token_to_kv_pool_allocator.backup_state()
    assert cache.admit("b", 12) is None
    assert (free(cache), table.generation.tolist(), table.row_to_state.tolist()) == (before, generation, maps)
    assert table.row_of("b") is None
    cache.release("b")
    assert free(cache) == before
    cache.token_to_kv_pool_allocator.restore_state(mark)  # nothing was freed, so marks stay valid


def test_what_is_taken_after_a_failed_admission_is_what_would_have_been(make_cache):
    one, other = make_cache("hybrid", max_running_requests=2), make_cache("hybrid", max_running_requests=2)
    for cache in (one, other):
        cache.admit("a", 5)
        cache.admit("b", 5)
    assert one.admit("c", 9) is None
    for cache in (one, other):
        cache.release("a")
    assert one.admit("d", 9).tolist() == other.admit("d", 9).tolist()
    assert one.req_to_token_pool.state_of("d") == other.req_to_token_pool.state_of("d")


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("mha", {"request": "a", "tokens": 5}, "request 'a' has a row already; extend it, or release it first"),
        ("mha", {"tokens": 0}, "request 'b' cannot begin with 0 tokens, 0 of them a prefix: a row has 260 columns"),
        ("mha", {"tokens": 261}, "cannot begin with 261 tokens, 0 of them a prefix: a row has 260 columns"),
        ("mha", {"tokens": 2.5}, "tokens and evicted holds .* no whole numbers"),
        ("mha", {"tokens": 9, "prefix": 6}, "request 'b': prefix=6 is no whole number of pages of 4 tokens"),
        ("mha", {"tokens": 7, "prefix": 8}, "cannot begin with 7 tokens, 8 of them a prefix"),
        ("mha", {"tokens": 9, "evicted": 10}, "evicted=10 is no part of its prefix"),
        ("mha", {"tokens": 9, "cached_state": 1}, "request 'b' cannot begin with a state: requests have none"),
        ("hybrid", {"tokens": 9, "cached_state": 12}, "cannot begin with state slot 12, which nobody holds"),
        ("hybrid", {"tokens": 9, "arriving": True}, "request 'b' cannot arrive"),
    ],
)
def test_an_admission_that_cannot_be_changes_nothing(make_cache, model, arguments, message):
    cache = make_cache(model)
    slots = cache.admit("a", 8)
    before = free(cache)
    given = {"request": "b"} | arguments
    if "prefix" in given:
        given["prefix"] = slots[: given["prefix"]]
    with pytest.raises(SlotError, match=message):
        cache.admit(**given)
    assert free(cache) == before
    assert cache.req_to_token_pool.row_of("b") is None
    cache.check(held=slots)


@pytest.mark.parametrize("asked", [{"arriving": True}, {"cached_state": 1}])
def test_what_a_plan_never_serves_is_refused_without_room_too(make_cache, asked):
    """Not ``None``, after which a scheduler would wait for room."""
    cache = make_cache("mha")
    while cache.admit(object(), 8) is not None:
        pass
    with pytest.raises(SlotError, match="request 'b' cannot"):
        cache.admit("b", 8, **asked)


def test_an_admission_behind_a_prefix_borrows_it(make_cache):
    cache = make_cache("hybrid")
    table = cache.req_to_token_pool
    prefix = cache.admit("a", 8)
    cache.prepare_states()
    states(cache).temporal_states(0)[table.state_of("a")] = 7
    cached = table.donate("a")
    cache.release("a", kept=8)
    new = cache.admit("b", 13, prefix=prefix, cached_state=cached)
    assert new.shape == (5,)
    assert table.req_to_token[table.row_of("b"), :13].tolist() == [*prefix.tolist(), *new.tolist()]
    cache.prepare_states()
    assert states(cache).temporal_states(0)[table.state_of("b")].unique().tolist() == [7]
    cache.release("b")
    cache.check(held=prefix, held_states=[cached])
    table.free_states([cached])
    cache.token_to_kv_pool_allocator.free(prefix)
    cache.close()


def test_a_prefix_of_all_tokens_takes_no_slot(make_cache):
    cache = make_cache("mha")
    prefix = cache.admit("a", 8)
    assert cache.admit("b", 8, prefix=prefix).tolist() == []
    cache.release("b")
    cache.check(held=prefix)


def test_admission_never_waits(make_cache):
    cache = make_cache("hybrid", debug=False, device="meta", **TRACKED)
    slots = cache.admit("a", 8)
    cache.req_to_token_pool.due_states()[0].fresh.clear()
    cached = cache.req_to_token_pool.donate("a")
    assert cache.admit("b", 13, prefix=slots, cached_state=cached).shape == (5,)
    assert cache.trim(["a"], [2]) == 4
    cache.release("a")
    assert cache.req_to_token_pool.live_rows() == {2: "b"}


def test_a_reused_state_is_zero(make_cache):
    """H-09: write ones, free, alloc the same slot, read."""
    cache = make_cache("hybrid", max_running_requests=1, prefix_cache=False)
    table, pool = cache.req_to_token_pool, states(cache)
    cache.admit("a", 4)
    cache.prepare_states()
    for layer_id in (0, 1, 3):
        for written in (pool.temporal_states(layer_id), pool.conv_states(layer_id)):
            written[table.states_of(["a"])] = 1
    assert table.state_of("a") == 1
    cache.release("a")
    assert pool.temporal_states(0)[1].sum() == 16  # cleared on first use, not on free
    cache.admit("b", 4)
    assert table.state_of("b") == 1
    cache.prepare_states()
    for layer_id in (0, 1, 3):
        assert pool.temporal_states(layer_id)[1].sum() == pool.conv_states(layer_id)[1].sum() == 0
    cache.prepare_states()
    assert pool.cleared == [[1], [1]]


def test_states_are_made_ready_in_one_call_each(make_cache):
    """H-09: a state that is filled by a copy is not cleared; the copy comes first."""
    cache = make_cache("hybrid", **TRACKED)
    table, pool = cache.req_to_token_pool, states(cache)
    cache.admit("a", 4)
    cache.admit("b", 4)
    cache.prepare_states()
    pool.temporal_states(1)[table.tracks_of(["a"])] = 9
    table.swap_tracks(["a"])
    cached = table.donate("a")
    assert cached == 2
    cache.admit("c", 4, cached_state=cached)
    cache.admit("d", 4, cached_state=cached)
    table.free_states([cached])
    pool.cleared.clear()
    cache.prepare_states()
    own = [table.state_of("c"), table.state_of("d")]
    assert pool.copied == [([2, 2], own)]
    assert [sorted(slots) for slots in pool.cleared] == [[7, 9, 10, 12, 13]]
    assert pool.temporal_states(1)[own].unique().tolist() == [9]
    cache.prepare_states()
    assert len(pool.copied) == len(pool.cleared) == 1


def test_without_states_there_is_nothing_to_prepare(make_cache):
    cache = make_cache("mha")
    cache.admit("a", 4)
    cache.prepare_states()
    with pytest.raises(SlotError, match=r"state slots \[3\] are held, but requests have no states in this plan"):
        cache.check(held_states=[3])
    cache.check(held_states=[])


def test_a_session_holds_its_slots_until_it_is_closed(make_cache):
    """H-08: open session → close; a slot that is merely held is no leak."""
    cache = make_cache("hybrid", **TRACKED)
    before = free(cache)
    first = cache.admit("session", 6)
    cache.prepare_states()
    kept = cache.req_to_token_pool.state_of("session")
    more = extend(cache, "session", 5)
    cache.check(held=torch.cat([first, more]), held_states=[])
    assert cache.req_to_token_pool.state_of("session") == kept
    cache.release("session")
    cache.release("session")
    assert free(cache) == before
    cache.check(held=NOTHING, held_states=[])


def test_a_request_that_waits_with_its_slots_is_no_leak(make_cache):
    """H-08: the check knows live requests, and takes what a prefix cache holds."""
    cache = make_cache("hybrid", **TRACKED)
    table = cache.req_to_token_pool
    slots = cache.admit("waiting", 6)
    cache.prepare_states()
    cached = table.donate("waiting")
    cache.check(held=slots, held_states=[cached])
    with pytest.raises(
        SlotError, match=rf"slots \[{cached}\] \(left by request 'waiting'\) are live but held by nobody"
    ):
        cache.check(held=slots, held_states=[])
    with pytest.raises(SlotError, match=r"slots \[19\] are held but free"):
        cache.check(held_states=[cached, 19])
    cache.release("waiting")
    cache.check(held=NOTHING, held_states=[cached])


def test_close_names_who_was_not_released(make_cache):
    cache = make_cache("hybrid")
    before = free(cache)
    cache.admit("chat-7", 6)
    with pytest.raises(SlotError, match=r"1 requests were not released: 'chat-7' \(6 tokens\)"):
        cache.close()
    assert free(cache) == before


def test_close_names_whose_slots_leaked(make_cache):
    cache = make_cache("hybrid")
    before = free(cache)
    cache.admit("chat-7", 6)
    cache.prepare_states()
    cache.req_to_token_pool.donate("chat-7", replace=False)
    cache.release("chat-7")
    with pytest.raises(SlotError, match=r"slots \[1\] \(left by request 'chat-7'\) are live but held by nobody"):
        cache.close()
    assert free(cache) == before
    cache = make_cache("hybrid")
    cache.admit("chat-8", 8)
    cache.req_to_token_pool.free("chat-8")
    with pytest.raises(SlotError, match=r"2 pages, at slots \[4, 8\] \(owner 'chat-8'\), are live but held by nobody"):
        cache.close()
    assert free(cache) == before
    cache = make_cache("hybrid")
    slots = cache.admit("chat-9", 8)
    cache.release("chat-9", kept=8)
    cache.close(held=slots)


def test_without_debug_close_gives_everything_back(make_cache):
    cache = make_cache("hybrid", debug=False)
    before = free(cache)
    cache.admit("a", 6)
    cache.close()
    assert free(cache) == before
    cache.close()
    with pytest.raises(SlotError, match="request 'a' cannot be admitted: the cache is closed; build another"):
        cache.admit("a", 6)
    assert free(cache) == before


@pytest.mark.parametrize("trims", [True, False])
def test_draft_tokens_that_were_not_accepted_go_back(make_cache, trims):
    """D-06: page 64: extend by 128, accept 3 tokens, release; 100 times."""
    cache = make_cache("mha", page_size=64, context_length=1024)
    allocator = cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    for i in range(100):
        cache.admit(i, 60 + i % 9)
        tokens = 60 + i % 9
        extend(cache, i, 128)
        if trims:
            pages = -(-(tokens + 3) // 64)
            assert cache.trim([i], [tokens + 3]) == (-(-(tokens + 128) // 64) - pages) * 64
            assert before - allocator.available_size() == pages * 64
            assert extend(cache, i, 1).tolist() == (
                cache.req_to_token_pool.req_to_token[cache.req_to_token_pool.row_of(i), tokens + 3].reshape(1).tolist()
            )
        cache.release(i)
        assert allocator.available_size() == before
    cache.check(held=NOTHING)


def test_speculation_step_after_step_leaks_nothing(make_cache):
    """D-06: 100 steps of one request; at most its own pages and those of one step are taken at any time."""
    cache = make_cache("mha", page_size=64, context_length=1024, debug=True)
    allocator = cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    cache.admit("a", 50)
    for length in range(53, 53 + 300, 3):
        extend(cache, "a", 128)
        cache.trim(["a"], [length])
        assert before - allocator.available_size() == -(-length // 64) * 64
    assert cache.trim(["a"], [350]) == 0
    cache.release("a")
    assert allocator.available_size() == before


@pytest.mark.parametrize("model", ["mha", "sliding", "all sliding"])
def test_a_batch_is_trimmed_to_whole_pages_on_both_sides(make_cache, model):
    cache = make_cache(model)
    before = free(cache)
    slots = {name: cache.admit(name, 30) for name in "abc"}
    cache.evict(["b"], [9])
    assert cache.trim(["a", "b", "c"], [8, 13, 30]) == 24 + 16 + 0
    kept = torch.cat([slots["a"][:8], slots["b"][8 if model == "all sliding" else 0 : 16], slots["c"]])
    cache.check(held=kept)
    assert cache.req_to_token_pool.lengths[1:4].tolist() == [8, 13, 30]
    if model == "sliding":
        assert before[1] - free(cache)[1] == 8 + (16 - 8) + 32
    for name in "abc":
        cache.release(name)
    assert free(cache) == before


@pytest.mark.parametrize(
    ("requests", "lengths", "message"),
    [
        (["a", "b"], [4, 31], "request 'b' wrote 30 tokens; lengths=31 of them cannot be meant"),
        (["a", "b"], [4, -1], "request 'b' cannot go back to -1 tokens"),
        (["a", "b"], [4, 19], "request 'b' cannot go back to 19 tokens: 8 are another's and 20 were evicted"),
        (["a", "a"], [4, 4], "request 'a' is named twice"),
        (["a", "z"], [4, 4], "request 'z' has no row"),
        (["a"], [4, 4], "1 requests but 2 lengths"),
    ],
)
def test_a_trim_that_cannot_be_changes_nothing(make_cache, requests, lengths, message):
    cache = make_cache("sliding")
    cache.admit("a", 30)
    cache.admit("b", 30)
    cache.hold_prefix("b", borrowed=8)
    cache.evict(["b"], [20])
    before = free(cache)
    with pytest.raises(SlotError, match=message):
        cache.trim(requests, lengths)
    assert free(cache) == before
    assert cache.req_to_token_pool.lengths[1:3].tolist() == [30, 30]


def test_debug_refuses_to_trim_what_two_own(make_cache):
    cache = make_cache("mha")
    slots = cache.admit("a", 16)
    cache.req_to_token_pool.write(cache.req_to_token_pool.alloc(["b"]), [0], [16], slots)
    with pytest.raises(SlotError, match="request 'b' gives back slots that request 'a' owns as well"):
        cache.trim(["b"], [4])
    cache.check(held=slots)


DRAFT = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=4, v_head_dim=4))
TREE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 5, "speculative_topk": 4}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_row_is_wide_enough_for_branches_on_pages_of_their_own(make_cache, steps):
    """D-05: page 64, topk 4, 5 steps: 2 pages a branch, 512 slots a step, 1,024 with overlap; more raises."""
    cache = make_cache("mha", [DRAFT], page_size=64, speculative_num_draft_tokens=8, **TREE)
    table = cache.req_to_token_pool
    before = free(cache)
    cache.admit("a", 256)
    extend(cache, "a", steps * 512)
    assert table.req_to_token.shape[1] == 256 + 2 * 512 + 63
    with pytest.raises(SlotError, match="columns 1344 … 1345 is no range of a table of 5 rows and 1343 columns"):
        table.write([1], [1344], [1345], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(SlotError, match="cannot begin with 1344 tokens"):
        cache.admit("b", 1344)
    cache.trim(["a"], [259])
    cache.release("a")
    assert free(cache) == before


def test_a_draft_shares_rows_slots_and_maps_and_has_no_states(make_cache):
    """The draft of a hybrid: its own attention layer and KV pool, everything else is the target's."""
    cache = make_cache("hybrid", [DRAFT], speculative_num_draft_tokens=4, **TREE)
    draft = cache.drafts["draft"]
    assert [choice.name for choice in cache.plan.outline.pools] == ["state", "full", "draft.full"]
    assert draft.parts.request_pool is cache.req_to_token_pool is states(cache).parts.request_pool
    assert draft.parts.allocator is cache.token_to_kv_pool_allocator
    assert draft.get_key_buffer(0).shape == (*cache.token_to_kv_pool.get_key_buffer(2).shape[:3], 4)
    slots = cache.admit("a", 10)
    for pool, layer_id, width in ((cache.token_to_kv_pool, 2, 8), (draft, 0, 4)):
        values = torch.ones(10, 1, width, dtype=torch.bfloat16)
        pool.set_kv_buffer(layer_id, slots, values, values)
    cache.prepare_states()
    assert cache.req_to_token_pool.row_to_state[cache.req_to_token_pool.row_of("a")] == 1
    cache.release("a")
    cache.close()
    assert cache.allocated_bytes() == cache.plan.total_bytes


def test_clear_forgets_states_as_well(make_cache):
    cache = make_cache("hybrid", **TRACKED)
    before = free(cache)
    cache.admit("a", 6)
    cache.prepare_states()
    cache.req_to_token_pool.donate("a")
    cache.clear()
    assert free(cache) == before
    cache.check(held=NOTHING, held_states=[])
    cache.prepare_states()
    assert len(states(cache).cleared) == 1


@pytest.mark.parametrize("tokens", [[], [4], 1.5, "4", None])
def test_what_is_no_number_of_tokens_is_refused(make_cache, tokens):
    cache = make_cache("mha")
    slots = cache.admit("a", 8)
    before = free(cache)
    for call in (lambda: cache.release("a", kept=tokens), lambda: cache.hold_prefix("a", borrowed=tokens)):
        with pytest.raises(SlotError, match=r"kept|borrowed"):
            call()
    assert free(cache) == before
    cache.check(held=slots)
