"""DeepSeek V4 on an NPU: how many drafts a step may verify, and that bundles and tables name the states of refused ones."""

import kvdock
import pytest

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

import numpy as np  # noqa: E402
from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402
from kvdock.testing.values import RunError, WrongValue  # noqa: E402
from kvdock_ascend.dsv4 import requests as npu_requests  # noqa: E402
from kvdock_ascend.dsv4.allocator import tail_start  # noqa: E402
from kvdock_dsv4 import objections  # noqa: E402
from small_dsv4 import drafting, narrow  # noqa: E402

LIMITS = [
    ([0, 4, 128], 128, 249, 4, 256),
    ([0, 128], 128, 257, 128, 384),
    ([0, 4], 256, 505, 4, 512),
    ([0, 4, 128], 256, 385, 128, 512),
    ([0, 4, 128], 512, 897, 128, 1024),
]
"""Ratios and page size → the most drafts, and the ratio and states that limit them.

max(2, ceil(1.8 · ratio / page) + 1) pages: 2 and 3 of 128, 2 and 2 of 256 and of 512; less the 7 or 127 tokens before one.
"""
IDS = ["pages of 128", "128 alone", "pages of 256, 4 alone", "pages of 256", "pages of 512"]


def begin_of_row(length, ratio):
    """Return the first token of which that row is made to which token `length` belongs; rows of 4 overlap."""
    return max(0, length - length % ratio - (4 if ratio == 4 else 0))


def lost(places, ratio, drafts):
    """Return the lengths at which so many drafts lie where the tokens do of which a refused one's row is made."""
    found = []
    for length in range(len(places) - drafts):
        kept = set(places[begin_of_row(length, ratio) : length])
        found += [length] if kept & set(places[length : length + drafts]) else []
    return found


@pytest.mark.parametrize(("ratios", "page", "most", "ratio", "rows"), LIMITS, ids=IDS)
def test_a_step_of_more_drafts_is_refused_with_the_most_that_works(ratios, page, most, ratio, rows, planned):
    config, rest = narrow(ratios), {"max_total_tokens": 8192, "page_size": page, "budget": 2**28}
    made = planned(config, **rest, **drafting(most))
    assert made.outline.spaces[f"c{ratio}_state"].rule.per_request == (rows, 1)
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        planned(config, **rest, **drafting(most + 1))
    (reason,) = [reason for plugin, reason in caught.value.objections if plugin == "dsv4"]
    assert reason == (
        f"speculative_num_draft_tokens={most + 1}: a step of {most + 1} tokens overwrites states of which rows of {ratio} "
        f"tokens are still made, for a request has {rows} in turn; give speculative_num_draft_tokens={most} or less"
    )


@pytest.mark.parametrize(("page", "ratio", "most"), [(128, 4, 249), (128, 128, 257), (256, 4, 505), (256, 128, 385)])
def test_the_places_of_a_request_leave_room_for_as_many_drafts_and_no_more(page, ratio, most, cached):
    cache = cached(page_size=page, swa_full_tokens_ratio=1.0, max_running_requests=2)
    cache.admit("other", 300)
    slots = cache.admit("a", 1536)
    places = cache.token_to_kv_pool.translate_loc_from_full_to_state(slots, f"c{ratio}_state").tolist()
    assert lost(places, ratio, most) == []
    assert lost(places, ratio, most + 1) != []


@pytest.fixture
def driven(cached):
    """Return a function that drives a request past the end of a row of 128, each step with as many drafts as may be."""

    def run(ratios, page, drafts):
        sizes = {"page_size": page, "swa_full_tokens_ratio": 1.0, "max_running_requests": 1}
        found = cached(narrow(ratios), **sizes, **drafting(drafts))
        arrival = Arrival(timestamp_ms=0.0, input_length=120, output_length=drafts + 12)
        return drive(found, [arrival], seed=1, speculating=1.0, max_steps=14)

    return run


@pytest.fixture
def cached(planned):
    """Return a function that builds a cache of a config on the host, with debug."""

    def make(config=None, **options):
        made = planned(config, **{"max_total_tokens": 4096, "budget": 2**28, **options})
        return kvdock.build(made, device="cpu", debug=True)

    return make


@pytest.mark.parametrize(("ratios", "page", "most"), [case[:3] for case in LIMITS[:4]], ids=IDS[:4])
def test_the_widest_step_is_driven_and_one_more_loses_a_state(ratios, page, most, driven, monkeypatch, widest):
    report = driven(ratios, page, most)
    assert (report.problems, report.rollbacks) == ((), len(widest))
    assert widest.count(most) >= 8  # from 120 tokens on, past the end of a row of each ratio
    kept = tuple(rule for rule in objections.RULES if rule is not objections._drafts_beyond_states)
    monkeypatch.setattr(objections, "RULES", kept)
    with pytest.raises(WrongValue, match="state"):
        driven(ratios, page, most + 1)


def test_a_run_finds_a_table_that_does_not_name_a_state_that_is_needed(driven, monkeypatch):
    monkeypatch.setattr(npu_requests, "tail_start", lambda name, seq, drafts: seq - 1)
    with pytest.raises(RunError, match=r"the table of c4_state names 0 for position \d+ of request row 1, whose state"):
        driven([0, 4, 128], 128, 16)


@pytest.mark.parametrize("drafts", [0, 1, 2, 5, 64, 128, 129, 249])
def test_the_tail_holds_all_that_any_accepted_part_of_a_step_goes_on_with(drafts):
    """By brute force: whatever of a step is accepted, states of the row that goes on are in the tail, and few others."""
    seq = np.arange(1, 1100)
    for ratio in (4, 128):
        found = tail_start(f"c{ratio}_state", seq, drafts)
        for length, begin in zip(seq.tolist(), found.tolist(), strict=True):
            needed = min(begin_of_row(kept, ratio) for kept in range(max(0, length - drafts), length + 1))
            assert 0 <= begin <= needed
            # What kernels of one step without drafts are told: an unfinished group of 128, and for 4 the 128 before.
            plain = max(0, length // 128 * 128 - (128 if ratio == 4 else 0))
            assert begin == min(needed, plain)


@pytest.mark.parametrize("page", [128, 256])
def test_bundles_and_tables_name_each_state_that_is_needed_if_drafts_are_refused(page, cached):
    """A step of 40 drafts from each length around the end of a page: none is accepted, and then some are."""
    cache = cached(page_size=page, swa_full_tokens_ratio=1.0, max_running_requests=1, **drafting(40))
    allocator, table, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool, cache.token_to_kv_pool
    cache.admit("a", 240)
    row = table.row_of("a")
    for length in range(240, 262):
        last, seq = table.req_to_token[row, length - 1 : length], length + 40
        batch = torch.tensor([length]), [length], torch.tensor([seq]), [seq], last, 40
        found = allocator.alloc_extend_bundle(*batch, owners=["a"])
        table.write([row], [length], [seq], found.full)
        for ratio, named in ((4, found.c4_state), (128, found.c128_state)):
            states = pool.translate_loc_from_full_to_state(table.req_to_token[row, :seq], f"c{ratio}_state")
            assert named.tolist() == states[length:].tolist()
            for accepted in (0, 1, 7, 23, 40):
                begin, end = begin_of_row(length + accepted, ratio), length + accepted
                assert torch.equal(table.tables[f"c{ratio}_state"][row, begin:end].long(), states[begin:end])
                assert bool((states[begin:end] >= page).all())
        cache.trim(["a"], [length])
        table.write([row], [length], [length + 1], take_one(allocator, length + 1, last))
    cache.release("a")
    cache.close()


def take_one(allocator, seq, last):
    return allocator.alloc_decode(torch.tensor([seq]), [seq], last, owners=["a"])


@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_mask_says_which_states_the_last_tokens_row_is_made_of(page, ratio, cached):
    """By brute force: the newest token at each place of a request's pages, and whether it is in that row."""
    cache = cached(page_size=page)
    ring = {(128, 4): 256, (128, 128): 384, (256, 4): 512, (256, 128): 512}[page, ratio]
    lengths = torch.tensor([1, 3, 4, 5, 127, 128, 129, 300, 385, 513])
    wanted = torch.zeros(len(lengths), ring, dtype=torch.bool)
    for i, length in enumerate(lengths.tolist()):
        wanted[i, torch.arange(begin_of_row(length - 1, ratio), length) % ring] = True
    assert torch.equal(cache.token_to_kv_pool.request_state_mask(lengths, ratio), wanted)


def test_a_row_or_position_that_does_not_exist_is_paddings(cached):
    cache = cached()
    slots = cache.admit("a", 300)
    pool, row = cache.token_to_kv_pool, cache.req_to_token_pool.row_of("a")
    columns = cache.req_to_token_pool.req_to_token.shape[1]
    cache.req_to_token_pool.req_to_token[row, -1] = slots[299]  # which position −1 must not find
    rows = torch.tensor([row, row, row, 5, -1, 0, row], dtype=torch.int32)
    positions = torch.tensor([299, columns, -1, 299, 299, 299, 2**40])
    for ratio in (4, 128):
        own = int(pool.translate_loc_from_full_to_state(slots[299:], f"c{ratio}_state"))
        assert pool.request_state_locs(rows, positions, ratio).tolist() == [own, 0, 0, 0, 0, 0, 0]
    assert int(pool.request_state_locs(rows[:1], positions[:1])) == own  # of ratio 128 unless another is named


@pytest.mark.parametrize("name", ["c4.state", "c4.index_state", "c128.state"])
@pytest.mark.parametrize("is_npu", [False, True])
def test_no_write_move_or_copy_reaches_the_empty_state(name, is_npu, planned, npu_pool):
    cache = kvdock.build(planned(max_total_tokens=4096), device="cpu", debug=False)
    pool = npu_pool(cache, name)[0] if is_npu else cache.pools[name]
    layer, columns = pool.layer_ids[-1], pool.get_states(pool.layer_ids[-1]).kv.shape[-1]
    page = [view[0].clone() for view in pool.slot_views()]
    loc = torch.tensor([0, 200, 5, -1, 127, 201])
    vectors = torch.randn(6, columns)
    pool.set_states(layer, loc, vectors, -vectors)
    pool.move_kv_cache(torch.tensor([0, 7, 300, 301, -1]), torch.tensor([200, 201, 200, 9, 200]))
    copies = pool.get_cpu_copy(loc)
    assert {copy.shape[0] for copy in copies} == {2}
    pool.load_cpu_copy(copies, torch.tensor([9, 302, 0, 303, -1, 127]))
    assert all(torch.equal(view[0], then) for view, then in zip(pool.slot_views(), page, strict=True))
    found = pool.read_states(layer, torch.tensor([300, 301, 302, 303]))
    assert torch.equal(found.kv, torch.stack([vectors[1], torch.zeros(columns), vectors[1], vectors[5]]))
    assert {cut.shape[0] for cut in pool.cut_copies(copies, loc, 2, 6)} == {1}
    with pytest.raises(kvdock.SlotError, match="do not fit"):
        pool.load_cpu_copy(copies, torch.tensor([9, 302, 0]))


def test_copies_of_request_rows_are_of_rows_that_exist(cached):
    cache = cached()
    cache.admit("a", 300)
    pool, one = cache.token_to_kv_pool, torch.tensor([1])
    assert pool.get_request_copy(one) == []
    pool.load_request_copy([], one)
    refused = [
        (lambda: pool.get_request_copy(torch.tensor([5])), "request row 5 is outside 0 … 4"),
        (lambda: pool.get_request_copy(torch.tensor([1, 1])), r"request rows \[1, 1\] name one twice"),
        (lambda: pool.get_request_copy(torch.tensor([2])), "request row 2 belongs to no request"),
        (lambda: pool.get_request_copy(torch.tensor([1.0])), "request rows of torch.float32"),
        (lambda: pool.load_request_copy([], torch.tensor([5])), "request row 5 is outside 0 … 4"),
        (lambda: pool.load_request_copy([torch.ones(1)], one), "1 copies for 0 tensors"),
        (lambda: pool.request_state_locs(one, torch.tensor([1.0])), "positions of torch.float32; give int64 or int32"),
        (lambda: pool.request_state_locs(torch.tensor([1.0]), one), "positions of torch.float32; give int64 or int32"),
        (lambda: pool.request_state_locs(one, one, 8), "no layer compresses by a ratio of 8"),
        (lambda: pool.request_state_mask(one, 8), "no layer compresses by a ratio of 8"),
        (lambda: pool.translate_loc_from_full_to_compressed(one, 8), "no layer compresses by a ratio of 8"),
        (
            lambda: pool.state_pool(2).set_states(
                2, pool.request_state_locs(one, one).repeat(2), *torch.ones(2, 2, 80)
            ),
            "one call writes slot .* of group 'c128.state' more than once",
        ),
    ]
    for call, message in refused:
        with pytest.raises(kvdock.SlotError, match=message):
            call()
