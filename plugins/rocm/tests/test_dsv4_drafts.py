"""DeepSeek V4 on AMD devices: how many drafts a step may verify, and which states of a ring are a request's own."""

import kvdock
import pytest

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402
from kvdock.testing.values import WrongValue  # noqa: E402
from kvdock_dsv4 import objections  # noqa: E402
from small_dsv4 import drafting, narrow  # noqa: E402

LIMITS = [([0, 4, 128], 9, 4, 16), ([4], 9, 4, 16), ([0, 128], 129, 128, 256)]
"""Ratios → the most drafts, and the ratio and ring that limit them: 16 less 7 tokens before one, or 256 less 127."""
IDS = ["both", "4 alone", "128 alone"]


def lost(places, ratio, drafts):
    """Return the lengths at which so many drafts lie where the tokens do of which a refused one's row is made."""
    found = []
    for length in range(len(places) - drafts):
        begin = length - length % ratio - (4 if ratio == 4 else 0)
        kept = set(places[max(0, begin) : length])
        found += [length] if kept & set(places[length : length + drafts]) else []
    return found


@pytest.mark.parametrize(("ratios", "most", "ratio", "rows"), LIMITS, ids=IDS)
def test_a_step_of_more_drafts_is_refused_with_the_most_that_works(ratios, most, ratio, rows, planned):
    config = narrow(ratios)
    assert planned(config, max_total_tokens=1024, **drafting(most)).total_bytes > 0
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        planned(config, max_total_tokens=1024, **drafting(most + 1))
    (reason,) = [reason for plugin, reason in caught.value.objections if plugin == "dsv4"]
    assert reason == (
        f"speculative_num_draft_tokens={most + 1}: a step of {most + 1} tokens overwrites states of which rows of {ratio} "
        f"tokens are still made, for a request has {rows} in turn; give speculative_num_draft_tokens={most} or less"
    )


@pytest.mark.parametrize(("ratio", "most"), [(4, 9), (128, 129)])
def test_the_places_of_a_request_leave_room_for_as_many_drafts_and_no_more(ratio, most, cached):
    pool = cached(**drafting(9)).token_to_kv_pool
    places = pool.request_state_locs(torch.full((900,), 2), torch.arange(900), ratio).tolist()
    assert lost(places, ratio, most) == []
    assert lost(places, ratio, most + 1) != []


@pytest.mark.parametrize(("ratios", "most"), [case[:2] for case in LIMITS], ids=IDS)
def test_the_widest_step_is_driven_and_one_more_loses_a_state(ratios, most, cached, monkeypatch, widest):
    def driven(drafts):
        found = cached(narrow(ratios), max_total_tokens=1024, **drafting(drafts))
        arrival = Arrival(timestamp_ms=0.0, input_length=120, output_length=drafts + 12)
        return drive(found, [arrival], seed=1, speculating=1.0, max_steps=14)

    report = driven(most)
    assert (report.problems, report.rollbacks) == ((), len(widest))
    assert widest.count(most) >= 8  # from 120 tokens on, past the end of a row of each ratio
    kept = tuple(rule for rule in objections.RULES if rule is not objections._drafts_beyond_states)
    monkeypatch.setattr(objections, "RULES", kept)
    with pytest.raises(WrongValue, match="state"):
        driven(most + 1)


@pytest.mark.parametrize("options", [{}, drafting(4)], ids=["plain", "drafts"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_mask_says_which_states_of_a_ring_the_last_tokens_row_is_made_of(options, ratio, cached):
    """By brute force: the newest token at each place of a ring, and whether it is in that row."""
    pool = cached(**options).token_to_kv_pool
    ring = (8 if ratio == 4 else 128) * (2 if options else 1)
    lengths = torch.tensor([1, 3, 4, 5, 127, 128, 129, 300, 385])
    wanted = torch.zeros(len(lengths), ring, dtype=torch.bool)
    for i, length in enumerate(lengths.tolist()):
        last = length - 1
        begin = max(0, last - last % ratio - (4 if ratio == 4 else 0))
        wanted[i, torch.arange(begin, length) % ring] = True
    assert torch.equal(pool.request_state_mask(lengths, ratio), wanted)
    assert not pool.request_state_mask(torch.tensor([0]), ratio).any()


def test_a_ring_that_is_handed_out_again_holds_old_states_which_the_mask_leaves_out(cached):
    cache = cached(max_running_requests=1)
    pool = cache.token_to_kv_pool
    cache.admit("a", 128)
    rows, every = torch.ones(128, dtype=torch.int64), torch.arange(128)
    pool.state_pool(2).set_states(2, pool.request_state_locs(rows, every), *torch.ones(2, 128, 80))
    cache.release("a"), cache.admit("b", 3)
    kv, _ = pool.state_pool(2).read_states(2, pool.request_state_locs(rows, every))
    assert bool((kv == 1).all())
    assert pool.request_state_mask(torch.tensor([3])).nonzero()[:, 1].tolist() == [0, 1, 2]


def test_a_row_that_does_not_exist_is_paddings(cached):
    """5 rows of rings of 128, 8 and 128: row 5 would lie in compressed rows, or behind the last ring."""
    pool = cached().token_to_kv_pool
    rows, positions = torch.tensor([5, -1, 4, 2**40], dtype=torch.int64), torch.tensor([3, 130, 130, 7])
    assert pool.request_swa_locs(rows, positions).tolist() == [3, 2, 4 * 128 + 2, 7]
    assert pool.request_state_locs(rows, positions, 4).tolist() == [3, 2, 4 * 8 + 2, 7]
    assert pool.request_state_locs(rows, positions, 128).tolist() == [3, 2, 4 * 128 + 2, 7]


def test_places_and_rows_that_do_not_fit_are_refused_and_nothing_is_written(cached):
    cache = cached()
    slots = cache.admit("a", 300)
    pool, k, none = cache.token_to_kv_pool, torch.ones(2, 1, 80), torch.tensor([], dtype=torch.int64)
    row, states, one = torch.tensor([1, 1]), pool.state_pool(2), torch.ones(1, 80)
    floats, copies = torch.tensor([1.0]), pool.get_request_copy(torch.tensor([1]))
    twice = "one call writes slot 131 of group '{}' more than once"
    refused = [
        (lambda: pool.request_state_locs(floats, none), "request rows and positions of torch.float32; give int64"),
        (lambda: pool.request_state_locs(none, floats), "request rows and positions of torch.float32; give int64"),
        (
            lambda: pool.request_state_locs(row, row, 8),
            "no layer compresses by a ratio of 8; this model's layers have 4, 128",
        ),
        (lambda: pool.request_state_mask(row, 2), "no layer compresses by a ratio of 2"),
        (lambda: pool.translate_loc_from_full_to_compressed(slots, 16), "no layer compresses by a ratio of 16"),
        (lambda: pool.set_swa_key_buffer(1, row, torch.tensor([3, 131]), k), twice.format("c4")),
        (lambda: states.set_states(2, torch.tensor([131, 131]), *torch.ones(2, 2, 80)), twice.format("c128.state")),
        (lambda: states.set_states(2, torch.tensor([300]), one, one), "request row 2 belongs to no request"),
        (
            lambda: pool.set_swa_key_buffer(1, row[:1], row, k),
            r"request rows of shape \[1\] for positions of shape \[2\]",
        ),
        (lambda: pool.read_swa_key(1, row + 1, row), "request row 2 belongs to no request"),
        (lambda: pool.get_request_copy(torch.tensor([1, 5])), "request row 5 is outside 0 … 4"),
        (lambda: pool.get_request_copy(torch.tensor([-1])), "request row -1 is outside 0 … 4"),
        (lambda: pool.get_request_copy(row), r"request rows \[1, 1\] name one twice"),
        (lambda: pool.get_request_copy(torch.tensor([2])), "request row 2 belongs to no request"),
        (
            lambda: pool.get_request_copy(floats),
            r"request rows of torch.float32 and shape \[1\]; give int64 or int32 \[n\]",
        ),
        (lambda: pool.get_request_copy(row.view(1, 2)), r"request rows of torch.int64 and shape \[1, 2\]"),
        (lambda: pool.load_request_copy(copies, torch.tensor([5])), "request row 5 is outside 0 … 4"),
        (
            lambda: cache.pools["c4"].set_kv_buffer(1, torch.tensor([256]), k[:1]),
            "'c4': request row 2 belongs to no request",
        ),
        (lambda: cache.pools["c4"].get_request_copy(torch.tensor([2])), "'c4': request row 2 belongs to no request"),
        (lambda: cache.pools["swa"].get_request_copy(torch.tensor([5])), "request row 5 is outside 0 … 4"),
        (lambda: cache.pools["c4.state"].load_request_copy(copies[:1], row), "name one twice"),
    ]
    before = [raw.clone() for raw in pool.storages()]
    for call, message in refused:
        with pytest.raises(kvdock.SlotError, match=message):
            call()
    assert all(torch.equal(now, then) for now, then in zip(pool.storages(), before, strict=True))
    # Padding may be written as often as a captured batch has empty places.
    pool.set_swa_key_buffer(1, torch.tensor([0, 0]), torch.tensor([3, 131]), k)
    states.set_states(2, torch.tensor([0, 0]), *torch.ones(2, 2, 80))
