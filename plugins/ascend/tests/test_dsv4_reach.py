"""DeepSeek V4 on an NPU: which rows of states can be reached, what padding keeps, and copies that come back elsewhere."""

import kvdock
import pytest

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402

STATES = ("c4.state", "c4.index_state", "c128.state")
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}


def live_slots(cache):
    table = cache.req_to_token_pool
    return torch.cat([table.req_to_token[row, : int(table.lengths[row])] for row in table.live_rows()])


@pytest.mark.parametrize(
    "options",
    [
        {"max_running_requests": 1},
        {"max_running_requests": 5},
        {"max_running_requests": 3, "page_size": 256},
        {"max_running_requests": 2, "page_size": 512},
        {"max_running_requests": 3, **EAGLE},
        {"max_running_requests": 2, "role": "decode", "decode_extra_slots": 3},
    ],
    ids=["one", "five", "pages of 256", "pages of 512", "drafts", "decode"],
)
def test_states_have_a_row_for_every_place_and_none_beside_the_guard(options, cached):
    """By brute force: largest place + 1 ≤ rows ≤ that + the declared guard, and no row but those of page 0 is idle."""
    page = options.get("page_size", 128)
    rows = options["max_running_requests"] + options.get("decode_extra_slots", 0)
    cache = cached(**{"max_total_tokens": 3 * rows * page, "swa_full_tokens_ratio": 1.0, **options})
    arriving = options.get("role") == "decode"
    for name in range(rows):
        # Three pages each: one of states for each of them, or two in turn.
        assert cache.admit(name, 3 * page, **({"arriving": True} if arriving else {})) is not None
    allocator = cache.token_to_kv_pool_allocator
    for name in STATES:
        pool = cache.pools[name]
        guard = type(pool).buffers(pool.query)[0].guard
        states = pool.get_key_buffer(pool.layer_ids[0])
        count = states.shape[0] * states.shape[1]
        places = allocator.translate_beside(pool.query.space.name, live_slots(cache))
        assert int(places.max()) + 1 <= count <= int(places.max()) + 1 + guard
        assert sorted(set(places.tolist())) == list(range(page, count))


def test_compressed_rows_are_reached_to_the_last_one_when_every_request_wastes_the_most(cached):
    """4 requests of 1,025 tokens begin 9 full pages each: 3 pages of rows of 4, one of 128."""
    cache = cached(max_total_tokens=36 * 128, swa_full_tokens_ratio=1.0)
    for name in range(4):
        assert cache.admit(name, 1152) is not None
    allocator = cache.token_to_kv_pool_allocator
    assert allocator.full_available_size() == 0
    for space, taken in (("c4", 12), ("c128", 4)):
        pool = cache.pools[space]
        rows = pool.get_key_buffer(pool.layer_ids[0])
        places = allocator.translate_beside(space, live_slots(cache))
        assert int(places.max()) // 128 == taken
        assert int(places.max()) < rows.shape[0] * rows.shape[1]


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("is_npu", [False, True])
def test_padding_stays_the_empty_state_whatever_is_written_there(name, is_npu, planned, npu_pool):
    """A batch of a graph is padded with slot 0, and tokens without a state have −1."""
    cache = kvdock.build(planned(max_total_tokens=4096), device="cpu", debug=False)
    pool = npu_pool(cache, name)[0] if is_npu else cache.pools[name]
    layer = pool.layer_ids[-1]
    columns = pool.get_states(layer).kv.shape[-1]
    rows = torch.randn(4, columns)
    pool.set_states(layer, torch.tensor([0, 200, -1, 0]), rows, -rows)
    row, score = pool.read_states(layer, torch.tensor([0, -1]))
    assert not row.any()
    assert score.unique().tolist() == [float("-inf")]
    found = pool.read_states(layer, torch.tensor([200]))
    assert torch.equal(found.kv, rows[1:2])
    assert torch.equal(found.score, -rows[1:2])


@pytest.mark.parametrize(
    "take",
    [
        lambda allocator: allocator.alloc(256, "a")[-1:],
        lambda allocator: allocator.alloc_pages(2, ["a", "a"])[-1:] * 128 + 127,
    ],
    ids=["alloc", "alloc_pages"],
)
def test_a_request_goes_on_behind_slots_that_it_took_by_name(take, cached):
    cache = cached()
    allocator = cache.token_to_kv_pool_allocator
    last = take(allocator)
    grown = torch.tensor([256]), [256], torch.tensor([300]), [300], last, 44
    with pytest.raises(kvdock.SlotError, match="'b' cannot go on behind 256 tokens that are another's"):
        allocator.alloc_extend(*grown, owners=["b"])
    assert len(allocator.alloc_extend(*grown, owners=["a"])) == 44


def test_a_name_whose_admission_failed_has_not_begun(cached, monkeypatch):
    cache = cached()
    allocator = cache.token_to_kv_pool_allocator
    with monkeypatch.context() as patched:
        patched.setattr(cache.req_to_token_pool, "alloc", lambda requests: None)
        assert cache.admit("b", 600) is None
    slots = cache.admit("a", 256)
    grown = torch.tensor([256]), [256], torch.tensor([300]), [300], slots[-1:], 44
    with pytest.raises(kvdock.SlotError, match="'b' cannot go on behind 256 tokens that are another's"):
        allocator.alloc_extend(*grown, owners=["b"])


def test_copies_come_back_bit_for_bit_in_other_slots_and_touch_no_other_request(cached):
    """700 tokens of which 500 left the window, every buffer full of noise; another request lies where they were."""
    cache = cached(swa_full_tokens_ratio=1.0)
    pool, table = cache.token_to_kv_pool, cache.req_to_token_pool
    slots = cache.admit("a", 700)
    for part in cache.pools.values():
        for view in part.slot_views():
            view.random_(-100, 100) if view.dtype is torch.int8 else view.normal_()
    cache.evict(["a"], [500])
    copies = pool.get_cpu_copy(slots)
    assert pool.get_request_copy(torch.tensor([table.row_of("a")])) == []
    cache.release("a")
    other = cache.admit("z", 130)
    before = pool.get_cpu_copy(other)
    again = cache.admit("b", 700)
    assert not torch.equal(again, slots)
    pool.load_cpu_copy(copies, again)
    found = pool.get_cpu_copy(again)
    window = pool.get_cpu_copy(again[512:])
    assert [part.shape[0] for part in window[:4]] == [188] * 4
    for part, saved in zip(found, copies, strict=True):
        assert torch.equal(part.view(torch.uint8), saved.view(torch.uint8))
    assert all(torch.equal(part, saved) for part, saved in zip(pool.get_cpu_copy(other), before, strict=True))


@pytest.mark.parametrize("context", [2, 3, 5, 100, 127, 129, 1023, 2047])
def test_contexts_that_end_amid_a_group_are_driven_to_their_last_token(context, planned, small):
    config = small | {"max_position_embeddings": context}
    cache = kvdock.build(planned(config, max_total_tokens=4096), device="cpu", debug=True)
    assert cache.plan.max_request_tokens == context
    output = min(20, context - 1)
    arrivals = [Arrival(timestamp_ms=0.0, input_length=context - output, output_length=output) for _ in range(4)]
    report = drive(cache, arrivals, seed=1)
    assert (report.finished, report.rejected, report.problems) == (4, 0, ())


def test_a_cache_is_as_new_when_it_was_cleared_and_cut(cached):
    """Live requests, a clear, smaller spaces, and requests again: sizes follow, padding is empty, all is handed out."""
    cache = cached(swa_full_tokens_ratio=1.0)
    allocator = cache.token_to_kv_pool_allocator
    cache.admit("a", 700), cache.admit("b", 300)
    with pytest.raises(kvdock.SlotError, match="live"):
        allocator.resize({"full": 1024})
    cache.clear()
    allocator.resize({"full": 1024, "swa": 1024, "c4": 384, "c4_state": 512})
    sides = allocator.parts.allocators
    assert {name: sides[name].available_size() for name in ("full", "swa", "c4", "c4_state")} == {
        "full": 1024,
        "swa": 1024,
        "c4": 384,
        "c4_state": 512,
    }
    states = cache.token_to_kv_pool.state_pool(1).read_states(1, torch.tensor([0]))
    assert (states.kv.unique().tolist(), states.score.unique().tolist()) == ([0.0], [float("-inf")])
    assert cache.admit("a", 700) is not None  # 6 pages: 2 of c4, 2 of states
    assert cache.admit("c", 300) is None  # 2 full pages are left, 3 are needed
    lacks = {lack.space for lack in allocator.shortfall(3)}
    assert lacks == {"full", "swa"}
    assert cache.admit("c", 256) is not None
    cache.release("a"), cache.release("c")
    cache.close()
