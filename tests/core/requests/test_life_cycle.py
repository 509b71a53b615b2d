"""Requests in a whole cache: shared prefixes, windows, rollbacks, and what debug mode says of mistakes."""

import threading
from pathlib import Path

import kvdock
import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

MODELS = Path(__file__).parents[2] / "models"
NOTHING = torch.zeros(0, dtype=torch.int64)


def built(model, page_size=16, debug=False, budget=2**27, **options):
    options = {"page_size": page_size, "max_running_requests": 8, "plugins": ()} | options
    plan = kvdock.plan(str(MODELS / f"{model}.json"), device="cpu", budget_bytes=budget, options=options)
    return kvdock.build(plan, debug=debug)


def all_sliding(debug=False, page_size=4):
    params = kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8)
    layer = kvdock.LayerSpec(kind="mha", params=params, window_tokens=15)
    model = kvdock.ModelSpec(name="m", architecture="M", layers=(layer,), context_length=256, dtype="bfloat16")
    options = {"page_size": page_size, "plugins": ()}
    return kvdock.build(kvdock.plan(model, device="cpu", budget_bytes=2**18, options=options), debug=debug)


def grow(cache, request, tokens, prefix=NOTHING):
    """Give a request `tokens` more tokens, after those of `prefix` if it is new; return the new slots."""
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    (row,) = table.alloc([request])
    if len(prefix) and not table.lengths[row]:
        table.write([row], [0], [len(prefix)], prefix)
    start = int(table.lengths[row])
    last = torch.tensor([int(table.req_to_token[row, start - 1]) if start else -1])
    lens = torch.tensor([start]), [start], torch.tensor([start + tokens]), [start + tokens]
    slots = allocator.alloc_extend(*lens, last, tokens)
    table.write([row], [start], [start + tokens], slots)
    return slots


def free(cache):
    """Free slots of each space."""
    allocator = cache.token_to_kv_pool_allocator
    parts = allocator.parts.allocators or {"all": allocator}
    return {name: part.available_size() for name, part in parts.items()}


@pytest.mark.parametrize("debug", [False, True])
def test_a_shared_prefix_is_left_alone_by_those_who_borrow_it(debug):
    cache = built("gpt-oss-20b", debug=debug)
    before, allocator = free(cache), cache.token_to_kv_pool_allocator
    prefix = grow(cache, "A", 64).clone()
    for name in "BC":
        grow(cache, name, 200, prefix)
        cache.hold_prefix(name, borrowed=64)
    full, swa = before["full"] - 64 - 2 * 208, before["swa"] - 64 - 2 * 208
    assert free(cache) == {"full": full, "swa": swa}
    cache.evict(["B", "C"], [64, 64])
    assert free(cache) == {"full": full, "swa": swa}
    cache.evict(["B"], [100])
    assert free(cache) == {"full": full, "swa": swa + 32}
    cache.evict(["A"], [64])
    assert free(cache) == {"full": full, "swa": swa + 96}
    cache.check()
    for name in "BCA":
        cache.release(name)
    assert free(cache) == before
    cache.check(held=NOTHING)
    taken = allocator.alloc(min(before.values()) // 16 * 16)
    assert int(allocator.translate(taken).min()) >= 16


def test_debug_names_both_who_claim_a_prefix():
    cache = built("gpt-oss-20b", debug=True)
    prefix = grow(cache, "A", 64).clone()
    grow(cache, "B", 200, prefix)
    before = free(cache)
    message = r"request 'B' gives back slots that request 'A' owns as well \(pages from slots \[16, 32, 48, 64\]\)"
    with pytest.raises(SlotError, match=message):
        cache.evict(["B"], [64])
    with pytest.raises(SlotError, match=message):
        cache.release("B")
    assert free(cache) == before
    cache.hold_prefix("B", borrowed=64)
    cache.release("B")
    cache.check(held=prefix)


@pytest.mark.parametrize("debug", [False, True])
def test_whoever_takes_slots_over_says_how_far_they_were_evicted(debug):
    cache = built("gpt-oss-20b", debug=debug)
    before = free(cache)
    slots = grow(cache, "A", 256).clone()
    cache.evict(["A"], [128])
    cache.release("A", kept=256)
    assert free(cache) == {"full": before["full"] - 256, "swa": before["swa"] - 128}
    grow(cache, "B", 16, slots)
    if debug:
        with pytest.raises(SlotError, match=r"sliding slots \(of request 'B'\) are freed twice.*hold_prefix"):
            cache.release("B")
    cache.hold_prefix("B", evicted=128)
    cache.evict(["B"], [144])
    cache.release("B")
    assert free(cache) == before
    cache.check(held=NOTHING)


def test_what_a_prefix_cache_takes_from_a_running_request_stays():
    cache = built("gpt-oss-20b", debug=True)
    allocator = cache.token_to_kv_pool_allocator
    slots = grow(cache, "A", 300).clone()
    cache.evict(["A"], [40])
    cache.hold_prefix("A", borrowed=64)
    cache.evict(["A"], [160])
    assert allocator.translate(slots).eq(0).nonzero().flatten().tolist() == [*range(32), *range(64, 160)]
    cache.release("A")
    cache.check(held=slots[:64])
    allocator.free(slots[:64])
    cache.check(held=NOTHING)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"borrowed": 8}, "borrowed=8 is no whole number of pages of 16 tokens, and a page has one owner; give 0"),
        ({"borrowed": 48}, "request 'A' wrote 40 tokens; borrowed=48 of them cannot be meant: give 0 … 40"),
        ({"borrowed": -16}, "borrowed=-16 of them cannot be meant"),
        ({"evicted": 41}, "evicted=41 of them cannot be meant"),
        ({"borrowed": 16.0}, r"borrowed holds \[16.0\], which are no whole numbers"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(numbers, message):
    cache = built("gpt-oss-20b")
    before = free(cache)
    grow(cache, "A", 40)
    with pytest.raises(SlotError, match=message):
        cache.hold_prefix("A", **numbers)
    with pytest.raises(SlotError, match="request 'B' has no row"):
        cache.hold_prefix("B")
    cache.release("A")
    assert free(cache) == before


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_was_rolled_back_belongs_to_others(page_size):
    cache = built("llama-3.1-8b", page_size, debug=True)
    allocator, before = cache.token_to_kv_pool_allocator, free(cache)
    own = grow(cache, "A", 16).clone()
    state = allocator.backup_state()
    grow(cache, "A", 32)
    allocator.restore_state(state)
    others = grow(cache, "B", 32).clone()
    with pytest.raises(SlotError, match=r"request 'A' gives back slots that request 'B' owns as well.*truncate"):
        cache.release("A")
    cache.check(held=torch.cat([own, others]))
    cache.truncate(["A"], [16])
    cache.release("A")
    cache.check(held=others)
    cache.release("B")
    assert free(cache) == before


def test_slots_that_nobody_was_handed_are_named_with_the_request():
    cache = built("llama-3.1-8b", debug=True)
    allocator = cache.token_to_kv_pool_allocator
    grow(cache, "A", 16)
    state = allocator.backup_state()
    grow(cache, "A", 32)
    allocator.restore_state(state)
    with pytest.raises(SlotError, match=r"from 32, 48 \(of request 'A'\) are freed twice"):
        cache.release("A")


def test_a_request_cannot_go_back_behind_what_it_gave_away():
    cache = built("gpt-oss-20b")
    grow(cache, "A", 200)
    cache.evict(["A"], [50])
    cache.hold_prefix("A", borrowed=16)
    with pytest.raises(
        SlotError, match="cannot go back to 49 tokens: 16 are another's and 50 were evicted; keep at least 50"
    ):
        cache.truncate(["A"], [49])
    assert cache.req_to_token_pool.lengths[1] == 200
    cache.truncate(["A"], [50])
    assert cache.req_to_token_pool.lengths[1] == 50


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (5, "request 'A': kept=5 is no whole number of pages of 16 tokens, and a page has one owner; give 0"),
        (40, "kept=40 is no whole number of pages of 16 tokens, and a page has one owner; give 32"),
        (48, "request 'A' wrote 40 tokens; kept=48 of them cannot be meant: give 0 … 40"),
        (-16, "kept=-16 of them cannot be meant"),
        (16.0, "no whole numbers"),
    ],
)
def test_only_whole_pages_can_be_kept(kept, message, debug):
    cache = built("llama-3.1-8b", debug=debug)
    slots = grow(cache, "A", 40)
    with pytest.raises(SlotError, match=message):
        cache.release("A", kept=kept)
    assert cache.req_to_token_pool.row_of("A") is not None
    cache.check(held=slots)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b", "all sliding"])
@pytest.mark.parametrize(
    ("requests", "ends", "message"),
    [
        (["A", "A"], [64, 64], "request 'A' is named twice in one call"),
        (["A", "Z"], [5], "2 requests but 1 ends; give one of each"),
        (["A"], [5, 6], "1 requests but 2 ends"),
        (["Z", "A"], [64, -5], "request 'A' wrote 100 tokens; its tokens before -5 cannot all have left"),
        (["Z", "A"], [64, 101], "request 'A' wrote 100 tokens; its tokens before 101 cannot all have left"),
        (["A"], [16.5], r"ends holds \[16.5\], which are no whole numbers"),
        (["A"], ["16"], "which are no whole numbers"),
        (["A", "nobody"], [64, 64], "request 'nobody' has no row"),
    ],
)
def test_an_evict_that_makes_no_sense_changes_nothing(model, requests, ends, message, debug):
    cache = all_sliding(debug) if model == "all sliding" else built(model, debug=debug)
    grow(cache, "A", 100)
    grow(cache, "Z", 100)
    before = free(cache)
    with pytest.raises(SlotError, match=message):
        cache.evict(requests, ends)
    assert free(cache) == before
    cache.check()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("ends", [(), (3,), (4, 7), (40,), (5, 5, 39)])
def test_where_every_layer_slides_whole_pages_go_back_with_their_last_token(ends, debug):
    cache = all_sliding(debug)
    allocator = cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    slots = grow(cache, "A", 41).clone()
    for end in ends:
        cache.evict(["A"], [end])
    gone = max(ends, default=0) // 4 * 4
    assert allocator.available_size() == before - 44 + gone
    cache.check(held=slots[gone:])
    cache.release("A")
    assert allocator.available_size() == before
    cache.check(held=NOTHING)


def test_mistral_gives_back_what_left_its_window():
    cache = built("mistral-7b-v0.1", budget=2**30, debug=True)
    allocator = cache.token_to_kv_pool_allocator
    before = allocator.available_size()
    grow(cache, "A", 5000)
    cache.evict(["A"], [900])
    assert allocator.available_size() == before - 5008 + 896
    cache.release("A")
    assert allocator.available_size() == before


def test_where_every_layer_slides_a_taken_over_prefix_starts_behind_what_is_gone():
    cache = all_sliding(debug=True)
    before = free(cache)
    slots = grow(cache, "A", 40).clone()
    cache.evict(["A"], [18])
    cache.release("A", kept=32)
    cache.check(held=slots[16:32])
    grow(cache, "B", 4, slots[:32])
    cache.hold_prefix("B", evicted=18)
    cache.evict(["B"], [21])
    cache.check(held=torch.cat([slots[20:32], cache.req_to_token_pool.req_to_token[2, 32:36].long()]))
    cache.release("B")
    assert free(cache) == before


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b", "all sliding"])
def test_evicting_nothing_leaves_a_state_that_can_be_restored(model):
    cache = all_sliding() if model == "all sliding" else built(model)
    allocator = cache.token_to_kv_pool_allocator
    grow(cache, "A", 40)
    state, before = allocator.backup_state(), free(cache)
    cache.evict(["A"], [0])
    cache.evict(["A"], [3])
    allocator.alloc(16)
    allocator.restore_state(state)
    assert free(cache) == before


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b"])
def test_debug_names_the_request_that_holds_wrong_slots(model):
    cache = built(model, debug=True)
    allocator, pool = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool
    slots = grow(cache, "chat-7", 40).clone()
    grow(cache, "other", 16)
    allocator.free(slots[32:])
    keys = torch.zeros(8, *pool.get_key_buffer(0).shape[2:], dtype=torch.bfloat16)
    for call in (
        lambda: allocator.free(slots[32:]),
        lambda: allocator.free_pages(slots[32:33] // 16),
        lambda: pool.set_kv_buffer(0, slots[32:], keys, keys),
        lambda: pool.set_kv_buffer(1, slots[32:], keys, keys),
        lambda: pool.get_cpu_copy(slots[32:]),
        lambda: cache.release("chat-7"),
    ):
        with pytest.raises(SlotError, match=r"from 48 \(of request 'chat-7'\)"):
            call()


def test_debug_refuses_every_call_from_another_thread():
    cache = built("gpt-oss-20b", debug=True)
    grow(cache, "A", 40)
    refused = []

    def elsewhere():
        allocator = cache.token_to_kv_pool_allocator
        for call in (
            lambda: cache.evict(["A"], [16]),
            lambda: cache.release("A"),
            lambda: cache.hold_prefix("A"),
            lambda: cache.truncate(["A"], [1]),
            cache.check,
            allocator.available_size,
            lambda: cache.req_to_token_pool.row_of("A"),
        ):
            with pytest.raises(SlotError, match="nothing locks"):
                call()
            refused.append(call)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 7
