"""States that follow request rows: where they lie, which of a ring are a request's own, and rows that nobody has."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.errors import SlotError  # noqa: E402

ONLINE = {"plugin_options": {"dsv4": {"online_compress": True}}}
SPECULATIVE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_topk": 1}


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize(("options", "ring"), [({}, 128), (SPECULATIVE, 256)])
def test_a_mask_says_which_states_of_a_ring_the_last_tokens_row_is_made_of(cache, options, ring):
    """By brute force: the newest token at each place, and whether it is in the row of the last one."""
    pool = cache(budget_bytes=2**24, **options).token_to_kv_pool
    lengths = tensor(1, 2, 127, 128, 129, 255, 256, 257, 300, 513)
    wanted = torch.zeros(len(lengths), ring, dtype=torch.bool)
    for i, length in enumerate(lengths.tolist()):
        wanted[i, torch.arange((length - 1) // 128 * 128, length) % ring] = True
    assert pool.request_state_mask(lengths).equal(wanted)
    assert not pool.request_state_mask(tensor(0)).any()


def test_a_ring_that_is_handed_out_again_holds_old_states_which_the_mask_leaves_out(cache):
    found = cache(max_running_requests=1)
    pool, every = found.token_to_kv_pool, torch.arange(128)
    found.admit("a", 128)
    places = pool.request_state_locs(torch.ones(128, dtype=torch.int64), every)
    pool.state_pool(2).set_states(2, places, *torch.ones(2, 128, 80))
    found.release("a")
    found.admit("b", 3)
    assert bool((pool.state_pool(2).read_states(2, places).kv == 1).all())
    assert pool.request_state_mask(tensor(3)).nonzero()[:, 1].tolist() == [0, 1, 2]


def test_a_row_that_does_not_exist_is_paddings(cache):
    # 4 requests and padding: row 5 would begin where the empty state lies
    pool = cache().token_to_kv_pool
    rows, positions = tensor(5, -1, 4, 2**40), tensor(3, 130, 130, 7)
    assert pool.request_state_locs(rows, positions).tolist() == [3, 2, 4 * 128 + 2, 7]
    online = cache(**ONLINE, **SPECULATIVE).token_to_kv_pool
    assert online.request_state_locs(rows.int(), positions).tolist() == [0, 0, 4 * 5, 0]  # 4 drafts: 5 rows a request


NO_ROW_4 = "request row 4 belongs to no request"
REFUSED = [
    (
        lambda pool: pool.request_state_locs(tensor(1), tensor(1), 4),
        "states of ratio 4 follow sliding pages, not request",
    ),
    (lambda pool: pool.request_state_mask(tensor(1), 4), "states of ratio 4 follow sliding pages, not request rows"),
    (lambda pool: pool.request_state_locs(tensor(1), tensor(1), 2), "by a ratio of 2; this model's layers have 4, 128"),
    (lambda pool: pool.request_state_locs(tensor(1), torch.ones(1)), "rows and positions of torch.float32; give int64"),
    (lambda pool: pool.request_state_locs(torch.ones(1), tensor(1)), "rows and positions of torch.float32; give int64"),
    (lambda pool: pool.translate_loc_from_full_to_compressed(tensor(300), 8), "no layer compresses by a ratio of 8"),
    (lambda pool: pool.get_request_copy(tensor(5)), "request row 5 is outside 0 … 4"),
    (lambda pool: pool.get_request_copy(tensor(-1)), "request row -1 is outside 0 … 4"),
    (lambda pool: pool.get_request_copy(tensor(1, 1)), r"request rows \[1, 1\] name one twice"),
    (lambda pool: pool.get_request_copy(tensor(4)), NO_ROW_4),
    (lambda pool: pool.get_request_copy(torch.ones(1)), r"torch.float32 and shape \[1\]; give int64 or int32 \[n\]"),
    (lambda pool: pool.get_request_copy(tensor(1).view(1, 1)), r"torch.int64 and shape \[1, 1\]; give"),
    (lambda pool: pool.load_request_copy(pool.get_request_copy(tensor(1)), tensor(5)), "request row 5 is outside"),
    (lambda pool: pool.load_request_copy(pool.get_request_copy(tensor(1)), tensor(4)), NO_ROW_4),
    (lambda pool: pool.state_pool(2).get_request_copy(tensor(5)), "request row 5 is outside 0 … 4"),
    (lambda pool: pool.state_pool(2).verify_request_copy(pool.get_request_copy(tensor(1)), tensor(4)), NO_ROW_4),
    (lambda pool: pool.state_pool(2).set_states(2, tensor(4 * 128), *torch.ones(2, 1, 80)), NO_ROW_4),
    (
        lambda pool: pool.state_pool(2).set_states(2, tensor(131, 131), *torch.ones(2, 2, 80)),
        "layer 2: one call writes slot 131 of group 'c128.state' more than once",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_rows_and_places_that_do_not_fit_are_refused_and_nothing_is_written(cache, call, message):
    found = cache()
    found.admit("a", 300)
    pool = found.token_to_kv_pool
    before = [raw.clone() for raw in pool.storages()]
    with pytest.raises(SlotError, match=message):
        call(pool)
    assert all(now.equal(then) for now, then in zip(pool.storages(), before, strict=True))


def test_rows_are_checked_where_nothing_is_kept_by_row(cache, small):
    found = cache(small | {"num_hidden_layers": 1, "compress_ratios": [4]})
    found.admit("a", 300)
    pool = found.token_to_kv_pool
    assert pool.get_request_copy(tensor(1)) == []
    for rows, message in [(tensor(5), "outside 0 … 4"), (tensor(1, 1), "name one twice"), (tensor(4), "no request")]:
        with pytest.raises(SlotError, match=message):
            pool.get_request_copy(rows)
        with pytest.raises(SlotError, match=message):
            pool.load_request_copy([], rows)
    with pytest.raises(SlotError, match="by a ratio of 128; this model's layers have 4"):
        pool.request_state_locs(tensor(1), tensor(1))


def test_online_states_have_no_ring_and_are_somebodys(cache):
    found = cache(**ONLINE, **SPECULATIVE)
    found.admit("a", 300)
    pool = found.token_to_kv_pool
    with pytest.raises(SlotError, match="states of ratio 128 are one running state a request here"):
        pool.request_state_mask(tensor(3))
    with pytest.raises(SlotError, match="request row 2 belongs to no request"):
        pool.state_pool(2).set_states(2, tensor(2 * 5), *torch.ones(3, 1, 80))
    pool.state_pool(2).set_states(2, tensor(1 * 5 + 4, 0, 0), *torch.ones(3, 3, 80))


def test_padding_is_written_as_often_as_a_captured_batch_has_empty_places(cache):
    found = cache()
    found.admit("a", 300)
    states = found.token_to_kv_pool.state_pool(2)
    states.set_states(2, tensor(0, 0, 5, 5, -1, -1, 131), *torch.ones(2, 7, 80))
    assert states.read_states(2, tensor(131)).kv.unique().tolist() == [1.0]
    kv, score = states.read_states(2, tensor(states.empty_slot))
    assert not kv.any()
    assert score.unique().tolist() == [float("-inf")]


def test_what_owns_nothing_moves_nothing_and_is_moved_nowhere(cache):
    found = cache()
    found.admit("a", 300)
    states = found.token_to_kv_pool.state_pool(2)
    states.set_states(2, tensor(128, 129), *torch.ones(2, 2, 80))
    states.move_kv_cache(tensor(130, 129, -1), tensor(128, -1, 128))
    kv = states.read_states(2, tensor(130, 129, 131)).kv
    assert kv.unique(dim=1).flatten().tolist() == [1.0, 1.0, 0.0]


def test_checks_of_rows_wait_for_no_device_and_are_made_with_debug_alone(plan, small):
    from kvdock.builder import build

    made = plan(small, 2**23, max_running_requests=4, swa_full_tokens_ratio=0.5)
    pool = build(made, device="meta", debug=False).token_to_kv_pool
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    pool.state_pool(2).set_states(2, pool.request_state_locs(rows, rows), *torch.empty(2, 3, 80, device="meta"))
    assert pool.request_state_mask(rows).shape == (3, 128)
    fast = build(made, device="cpu", debug=False).token_to_kv_pool
    fast.state_pool(2).set_states(2, tensor(131, 131), *torch.ones(2, 2, 80))
