"""What debug mode sees of prefixes and rows, and what is refused in any mode, with nothing changed."""

import kvdock
import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

NOTHING = torch.zeros(0, dtype=torch.int64)


def cache_of(model="gpt-oss-20b", debug=True, budget=2**27, parallel=None, **options):
    plan = kvdock.plan(
        f"tests/models/{model}.json",
        device="cpu",
        budget_bytes=budget,
        parallel=parallel or kvdock.Parallelism(),
        options={"page_size": 16, "context_length": 1024, **options},
    )
    return kvdock.build(plan, debug=debug)


def all_sliding(debug=True):
    params = kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8)
    layer = kvdock.LayerSpec(kind="mha", params=params, window_tokens=15)
    model = kvdock.ModelSpec(name="m", architecture="M", layers=(layer,), context_length=256, dtype="bfloat16")
    options = {"page_size": 16, "plugins": ()}
    return kvdock.build(kvdock.plan(model, device="cpu", budget_bytes=2**18, options=options), debug=debug)


def hybrid(debug=True, **options):
    parallel = kvdock.Parallelism(tp_size=16)
    return cache_of("qwen3-next-80b-a3b", debug, 2**27, parallel, max_state_slots=6, **options)


def state(cache):
    """All that a refused call must leave as it is."""
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    parts = allocator.parts.allocators or {"all": allocator}
    found = {name: part.available_size() for name, part in parts.items()}
    rows = {
        name: table.req_to_token[row, : int(table.lengths[row])].tolist() for row, name in table.live_rows().items()
    }
    return found, table.available_size(), rows


def lent(cache, by_hand=False):
    """Let "own" write 100 tokens, of which "borrower" begins with 64; return the slots of those."""
    prefix = cache.admit("own", 100)[:64].clone()
    if not by_hand:
        cache.admit("borrower", 90, prefix=prefix)
        return prefix
    table = cache.req_to_token_pool
    (row,) = table.alloc(["borrower"])
    table.write([row], [0], [64], prefix)
    cache.hold_prefix("borrower", borrowed=64)
    return prefix


GIVING = {
    "release": lambda cache: cache.release("own"),
    "release of some": lambda cache: cache.release("own", kept=48),
    "trim": lambda cache: cache.trim(["own"], [48]),
    "truncate": lambda cache: cache.truncate(["own"], [48]),
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("call", GIVING)
@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b", "all sliding"])
def test_debug_refuses_to_give_back_what_another_borrows(model, call, by_hand):
    cache = all_sliding() if model == "all sliding" else cache_of(model)
    prefix = lent(cache, by_hand)
    before, last = state(cache), int(prefix[48])
    slots = r"\[16, 32, 48, 64\]" if call == "release" else rf"\[{last}\]"
    with pytest.raises(SlotError, match=rf"request 'own' gives back slots that request 'borrower' borrows.*{slots}"):
        GIVING[call](cache)
    assert state(cache) == before
    cache.release("borrower")
    GIVING[call](cache)
    assert state(cache) != before


@pytest.mark.parametrize("call", GIVING)
def test_without_debug_nothing_is_looked_for(call):
    cache = cache_of(debug=False)
    lent(cache)
    GIVING[call](cache)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "all sliding"])
def test_debug_refuses_to_evict_what_another_still_sees(model):
    cache = all_sliding() if model == "all sliding" else cache_of(model)
    lent(cache)
    before = state(cache)
    with pytest.raises(
        SlotError, match=r"'own' gives back slots that request 'borrower' borrows.*evict 'borrower' as far"
    ):
        cache.evict(["own"], [64])
    assert state(cache) == before
    cache.evict(["own"], [15])  # no page ends before it
    cache.evict(["borrower"], [40])
    with pytest.raises(SlotError, match=r"pages from slots \[48\]"):
        cache.evict(["own"], [48])
    cache.evict(["own"], [47])
    cache.evict(["own", "borrower"], [80, 80])
    assert state(cache) != before
    cache.release("borrower")
    cache.release("own")
    cache.check(NOTHING)


def test_what_an_owner_gave_up_before_is_nobodys_fault():
    """A prefix cache lends: those who share it come and go in any order."""
    cache = cache_of()
    prefix = cache.admit("first", 64)
    cache.release("first", kept=64)
    for name in ("a", "b"):
        cache.admit(name, 90, prefix=prefix)
    cache.evict(["a"], [80])
    cache.trim(["a"], [80])
    cache.release("a")
    cache.release("b")
    cache.check(prefix)


def test_what_was_rolled_back_and_lent_by_another_can_be_forgotten():
    cache = cache_of("llama-3.1-8b")
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    cache.admit("a", 16)
    mark = allocator.backup_state()
    drafts = allocator.alloc(32)
    table.write([1], [16], [48], drafts)
    allocator.restore_state(mark)
    taken = cache.admit("b", 32)
    assert taken.tolist() == drafts.tolist()
    cache.admit("c", 40, prefix=taken)
    cache.truncate(["a"], [16])
    for name in "acb":
        cache.release(name)
    cache.check(NOTHING)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b", "all sliding"])
@pytest.mark.parametrize("kind", ["freed", "never handed out", "padding", "waiting"])
def test_debug_names_slots_of_a_prefix_that_are_not_live(model, kind):
    cache = all_sliding() if model == "all sliding" else cache_of(model)
    allocator = cache.token_to_kv_pool_allocator
    prefix = allocator.alloc(32)
    wrong = prefix.clone()
    if kind == "padding":
        wrong[16:] = 0
    elif kind == "never handed out":
        wrong[16:] += 16
    elif kind == "freed":
        allocator.free(prefix[16:])
    else:
        allocator.free_group_begin()
        allocator.free(prefix[16:])
    before = state(cache)
    slot = {"padding": 0, "never handed out": 48}.get(kind, 32)
    with pytest.raises(SlotError, match=rf"request 'b' cannot borrow .*\b{slot}\b"):
        cache.admit("b", 40, prefix=wrong)
    assert state(cache) == before


def test_slots_of_a_prefix_that_left_the_window_need_not_be_live():
    cache = all_sliding()
    prefix = cache.admit("a", 48)
    cache.evict(["a"], [40])
    cache.release("a", kept=48)
    with pytest.raises(SlotError, match=r"cannot borrow slots \[16, 17, .* of its prefix, which are not live"):
        cache.admit("b", 60, prefix=prefix)
    cache.admit("b", 60, prefix=prefix, evicted=40)
    cache.release("b")
    cache.check(prefix[32:])


def test_debug_names_slots_that_are_borrowed_by_hand_and_not_live():
    cache = cache_of("llama-3.1-8b")
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    slots = allocator.alloc(32)
    (row,) = table.alloc(["a"])
    table.write([row], [0], [32], slots)
    allocator.free(slots[16:])
    with pytest.raises(SlotError, match=r"request 'a' cannot borrow slots \[32, 33, .* \(16 in all\)"):
        cache.hold_prefix("a", borrowed=32)
    cache.hold_prefix("a", borrowed=16)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([101, 4], "request 'a' wrote 100 tokens, so slots from column 101 on leave columns 100 … 101 without any"),
        ([100, 8], "request 'b' wrote 4 tokens, so slots from column 8 on leave columns 4 … 8 without any"),
    ],
)
def test_debug_refuses_a_gap_in_a_row(starts, message):
    cache = cache_of("llama-3.1-8b")
    table = cache.req_to_token_pool
    cache.admit("a", 100)
    cache.admit("b", 4)
    before, slots = state(cache), torch.arange(16, 26)
    with pytest.raises(SlotError, match=message):
        table.write([1, 2], starts, [start + 5 for start in starts], slots)
    assert state(cache) == before
    table.write([1, 1, 2], [104, 100, 2], [106, 104, 6], slots)  # together they leave none
    assert table.lengths[1:3].tolist() == [106, 6]


def test_what_left_every_window_is_written_as_padding_and_leaves_no_gap():
    cache = all_sliding()
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    (row,) = table.alloc(["back"])
    table.write([row], [0], [32], torch.zeros(32, dtype=torch.int64))
    cache.hold_prefix("back", evicted=32)
    table.write([row], [32], [48], allocator.alloc(16))
    cache.release("back")
    cache.check(NOTHING)


def test_without_debug_a_gap_is_written():
    cache = cache_of("llama-3.1-8b", debug=False)
    table = cache.req_to_token_pool
    table.write(table.alloc(["a"]), [8], [10], torch.arange(2))
    assert table.lengths[1] == 10


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.admit(None, 20),
        lambda cache: cache.release(None),
        lambda cache: cache.hold_prefix(None),
        lambda cache: cache.evict(["a", None], [1, 1]),
        lambda cache: cache.trim([None], [0]),
        lambda cache: cache.truncate([None], [0]),
        lambda cache: cache.req_to_token_pool.alloc(["b", None]),
        lambda cache: cache.req_to_token_pool.free(None),
        lambda cache: cache.req_to_token_pool.row_of(None),
        lambda cache: cache.req_to_token_pool.truncate([None], [0]),
    ],
)
@pytest.mark.parametrize("role", ["none", "decode"])
def test_no_request_is_named_none(call, debug, role):
    cache = hybrid(debug, role=role)
    cache.admit("a", 20)
    before = state(cache)
    with pytest.raises(SlotError, match="a request is named None, which stands for no request"):
        call(cache)
    assert state(cache) == before


@pytest.mark.parametrize("names", ["abc", b"abc"])
@pytest.mark.parametrize(
    "call",
    [
        lambda cache, names: cache.req_to_token_pool.alloc(names),
        lambda cache, names: cache.req_to_token_pool.states_needed(names),
        lambda cache, names: cache.evict(names, [0, 0, 0]),
        lambda cache, names: cache.trim(names, [0, 0, 0]),
        lambda cache, names: cache.truncate(names, [0, 0, 0]),
    ],
)
def test_a_text_is_no_list_of_requests(call, names):
    cache = hybrid()
    for name in [*names]:
        cache.admit(name, 4)
    before = state(cache)
    with pytest.raises(
        SlotError, match=r"is the text b?'abc', whose characters are no requests; give a list: \[b?'abc'\]"
    ):
        call(cache, names)
    assert state(cache) == before


def test_what_cannot_be_hashed_names_no_request():
    cache = cache_of()
    for call in (lambda: cache.admit([1], 20), lambda: cache.release({}), lambda: cache.req_to_token_pool.alloc([[1]])):
        with pytest.raises(SlotError, match="nothing was changed"):
            call()
    with pytest.raises(SlotError, match="requests=7 is no list of hashable names"):
        cache.req_to_token_pool.alloc(7)
    cache.check(NOTHING)


@pytest.mark.parametrize("debug", [False, True])
def test_a_prefix_is_a_tensor_of_whole_numbers(debug):
    cache = cache_of(debug=debug)
    prefix = cache.admit("a", 16)
    cache.release("a", kept=16)
    before = state(cache)
    for wrong, found in (
        (prefix.tolist(), "a list"),
        (prefix.numpy(), "a ndarray"),
        (prefix.double(), "of type torch"),
    ):
        with pytest.raises(SlotError, match=f"prefix is {found}.*give a tensor of int64 or int32"):
            cache.admit("b", 20, prefix=wrong)
    with pytest.raises(SlotError, match=r"prefix has the shape \[4, 4\]"):
        cache.admit("b", 20, prefix=prefix.view(4, 4))
    assert state(cache) == before


@pytest.mark.parametrize("wrong", [[16, 17], torch.tensor([16.0, 17.0])])
def test_a_row_takes_slots_from_a_tensor_of_whole_numbers(wrong):
    cache = cache_of("llama-3.1-8b", debug=False)
    (row,) = cache.req_to_token_pool.alloc(["a"])
    with pytest.raises(SlotError, match=r"slots is .*; give a tensor of int64 or int32"):
        cache.req_to_token_pool.write([row], [0], [2], wrong)
    assert cache.req_to_token_pool.lengths[row] == 0
    assert not cache.req_to_token_pool.req_to_token.any()


@pytest.mark.parametrize("tokens", [2**63, 2**64, 2**80, -(2**63), None])
def test_no_length_wraps_into_one_that_fits(tokens):
    cache = cache_of()
    with pytest.raises(SlotError, match=r"no whole numbers|cannot begin with"):
        cache.admit("a", tokens)
    cache.check(NOTHING)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([1.0], r"held_states holds \[1.0\], which are no whole numbers"),
        (torch.tensor([1.5]), "held_states is of type torch.float32; give a tensor of int64 or int32"),
        ([2, 2], "held_states names 2 more than once"),
        (torch.tensor([2, 2]), "held_states names 2 more than once"),
        ([2, 99], r"slots \[99\] are held but do not exist; there are 1 … 6"),
        ([2, 0], r"slots \[0\] are held but do not exist"),
        ([1, 2], r"held_states names \[1\], which are live requests' own \('a'\)"),
        ([2, 3], r"slots \[3\] are held but free"),
        ([], r"slots \[2\] \(left by request 'a'\) are live but held by nobody"),
    ],
)
def test_held_states_are_those_of_a_prefix_cache_each_once(states, message, debug):
    cache = hybrid(debug, state_extra_buffer="off")
    cache.admit("a", 16)
    cache.prepare_states()
    assert cache.req_to_token_pool.donate("a") == 2
    for held in ([2], (2,), {2}, iter([2]), torch.tensor([2])):
        cache.check(held_states=held)
    with pytest.raises(SlotError, match=message):
        cache.check(held_states=states)


def test_held_states_are_refused_where_there_are_none():
    cache = cache_of()
    cache.check(held_states=torch.tensor([], dtype=torch.int64))
    with pytest.raises(SlotError, match=r"state slots \[3, 4\] are held, but requests have no states"):
        cache.check(held_states=torch.tensor([3, 4]))


def test_a_state_to_begin_with_is_a_whole_number():
    cache = hybrid(state_extra_buffer="off")
    cache.admit("a", 16)
    cache.prepare_states()
    slot = cache.req_to_token_pool.donate("a")
    with pytest.raises(SlotError, match="cached_slot holds"):
        cache.admit("b", 20, cached_state=float(slot))
    assert cache.req_to_token_pool.row_of("b") is None
    assert cache.admit("b", 20, cached_state=slot) is not None
