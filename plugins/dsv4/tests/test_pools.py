"""Where rows and states lie, what moves and copies take along, what transfers are told."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.errors import PlanError, PluginError, SlotError  # noqa: E402
from kvdock.planned import Parts  # noqa: E402
from kvdock_dsv4 import hooks  # noqa: E402
from kvdock_dsv4.geometry import state_slot  # noqa: E402
from kvdock_dsv4.pools.index import IndexPool  # noqa: E402
from kvdock_dsv4.pools.router import DSV4Pool  # noqa: E402

ONLINE = {"plugin_options": {"dsv4": {"online_compress": True}}}
SPECULATIVE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_topk": 1}
C4, C128 = 1, 2
"""Layers of ratio 4 and of ratio 128 in the small model; layer 0 keeps its window alone."""


def begin(cache, name, tokens):
    """Admit a request of so many tokens; return its row and slots."""
    slots = cache.admit(name, tokens)
    return cache.req_to_token_pool.row_of(name), slots


def rows(n, columns=80, seed=0):
    return torch.randn(n, 1, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stored(pool, layer, slots):
    """What a read gives of rows after one round through the format."""
    return pool.read_kv(layer, slots)[0]


def test_sliding_rows_read_back_and_are_keys_and_values(cache):
    found = cache()
    pool, (_, slots) = found.token_to_kv_pool, begin(found, "a", 300)
    pool.set_kv_buffer(0, slots, rows(300), None)
    keys, values = pool.read_kv(0, slots)
    assert keys.equal(values) and keys.shape == (300, 1, 80)
    assert (keys[..., 64:]).equal(rows(300)[..., 64:])  # columns with a position are kept as they are
    assert (keys - rows(300)).abs().max() < 0.26  # half a step of e4m3 from 4 on
    nope, rope = pool.get_mla_kv_buffer(0, slots)
    assert torch.cat([nope, rope], -1).equal(keys)
    swa = pool.translate_loc_from_full_to_swa(slots)
    dense = pool.get_key_buffer(0)
    assert dense[swa // 256, swa % 256].equal(keys)


def test_a_pair_of_parts_is_written_as_whole_rows_are(cache):
    found = cache()
    pool, (_, slots) = found.token_to_kv_pool, begin(found, "a", 8)
    pool.set_kv_buffer(0, slots, rows(8), None)
    pool.set_mla_kv_buffer(1, slots, rows(8)[..., :64], rows(8)[..., 64:])
    assert pool.read_kv(0, slots)[0].equal(pool.read_kv(1, slots)[0])


def test_compressed_rows_lie_at_the_last_token_of_each_group(cache):
    found = cache()
    pool, (_, slots) = found.token_to_kv_pool, begin(found, "a", 300)
    for layer, ratio in ((C4, 4), (C128, 128)):
        places = pool.translate_loc_from_full_to_compressed(slots, ratio)
        assert [i for i, place in enumerate(places.tolist()) if place >= 0] == list(range(ratio - 1, 300, ratio))
        ends = slots[ratio - 1 :: ratio]
        assert places[places >= 0].equal(ends // ratio)
        written = rows(len(ends), seed=ratio)
        pool.set_extra_key_buffer(layer, ends, written)
        assert (pool.read_extra_key(layer, ends) - written).abs().max() < 0.26


def test_a_write_for_a_token_that_ends_no_group_lands_in_padding(cache):
    found = cache()
    pool, (_, slots) = found.token_to_kv_pool, begin(found, "a", 8)
    pool.set_extra_key_buffer(C4, slots, rows(8))
    raw = pool.get_extra_key_buffer(C4)
    assert raw[0].any()
    assert (pool.read_extra_key(C4, slots[3::4]) - rows(8)[3::4]).abs().max() < 0.26


@pytest.mark.parametrize("dtype", ["auto", "fp4"])
def test_index_keys_read_back(cache, dtype):
    found = cache(index_dtype=dtype)
    pool, (_, slots) = found.token_to_kv_pool, begin(found, "a", 64)
    keys = torch.randint(-3, 4, (16, 128)).float()
    keys[:, ::32] = 6.0
    pool.set_index_k(C4, slots[3::4], keys)
    assert (pool.read_index_k(C4, slots[3::4]) - keys).abs().max() < (0.5 if dtype == "auto" else 1.1)
    assert pool.get_index_k_with_scale_buffer(C4).shape[1] == 64 * (132 if dtype == "auto" else 68)
    raw, scales = pool.index_pool(C4).index.encode(keys)
    pool.set_index_k_scale_buffer(C4, slots[3::4], raw, scales)
    assert pool.read_index_k(C4, slots[3::4]).equal(pool.index_pool(C4).index.decode(raw, scales))


def test_distinct_tokens_have_distinct_compressed_slots(cache):
    # P-11: brute force over every token of the pool
    found = cache()
    pool, allocator = found.token_to_kv_pool, found.token_to_kv_pool_allocator
    slots = torch.arange(256, 256 + allocator.size)
    for space, ratio in (("c4", 4), ("c128", 128)):
        places = pool.translate_loc_from_full_to_compressed(slots, ratio)
        places = places[places >= 0]
        page = found.plan.outline.spaces[space].page_size
        assert places.equal(torch.arange(page, page + found.plan.spaces[space]))  # each slot once, padding never


@pytest.mark.parametrize(("options", "ring"), [({}, 8), (SPECULATIVE, 16)])
def test_states_of_pages_reach_every_row_but_the_guard(cache, options, ring):
    found = cache(**options)
    size, page = found.plan.spaces["swa"], 256
    reached = sorted({state_slot(slot, page, ring) for slot in range(size + page)})
    assert reached == list(range(size // page * ring + ring))
    for name in ("c4.state", "c4.index_state"):
        rows_ = found.pools[name].get_states(C4).kv.shape[0]
        assert reached[-1] + 1 <= rows_ <= reached[-1] + 1 + 1 + 3  # the empty state, rounded up to groups of 4
        assert found.pools[name].empty_slot == rows_ - 1 > reached[-1]


@pytest.mark.parametrize(
    ("options", "ring", "extra"),
    [
        ({}, 128, 0),
        (SPECULATIVE, 256, 0),
        ({"role": "decode", "decode_extra_slots": 3, "max_running_requests": 2}, 128, 3),
    ],
)
def test_states_of_requests_reach_every_row_but_the_guard(cache, options, ring, extra):
    found = cache(budget_bytes=2**24, **options)
    pool, requests = found.token_to_kv_pool, found.plan.max_running_requests + extra
    numbers = torch.arange(requests + 1).repeat_interleave(ring)
    reached = pool.request_state_locs(numbers, torch.arange(ring).repeat(requests + 1))
    assert reached.equal(torch.arange((requests + 1) * ring))
    count = found.pools["c128.state"].get_states(C128).kv.shape[0]
    assert len(reached) <= count <= len(reached) + ring + 1 + 127  # a ring and the empty state, rounded up to groups


def test_online_states_reach_every_row_but_two(cache):
    found = cache(**ONLINE, **SPECULATIVE)
    pool = found.pools["c128.state"]
    reached = pool.slots_of_rows(torch.arange(found.plan.max_running_requests + 1))
    assert reached.equal(torch.arange((4 + 1) * 5))
    assert pool.get_states(C128).kv.shape[0] == len(reached) + 2 * 5


def test_the_empty_state_is_the_last_row_and_survives_a_clear(cache):
    found = cache()
    for name, layer in (("c4.state", C4), ("c4.index_state", C4), ("c128.state", C128)):
        pool = found.pools[name]
        for _ in range(2):
            kv, score = pool.get_states(layer)
            assert not kv[pool.empty_slot].any() and score[pool.empty_slot].eq(-torch.inf).all()
            pool.set_states(layer, torch.tensor([1]), *(torch.ones(1, kv.shape[1]) for _ in range(2)))
            pool.clear()
        assert not pool.get_states(layer).kv.any()


def test_states_have_the_type_that_is_asked_for(cache):
    assert cache().pools["c4.state"].get_states(C4).kv.dtype == torch.float32
    assert cache(state_dtype="bf16").pools["c128.state"].get_states(C128).score.dtype == torch.bfloat16


def test_a_state_follows_its_sliding_page_through_evictions(cache):
    found = cache()
    pool, (_, slots) = found.token_to_kv_pool, begin(found, "a", 600)
    states = found.pools["c4.state"]
    locs = pool.translate_loc_from_full_to_state(slots)
    last = locs[248:256]  # the last 8 tokens of the first page, then those of the second
    states.set_states(C4, last, torch.full((8, 160), 2.0), torch.full((8, 160), 3.0))
    found.evict(["a"], [255])  # not all of the page left the window
    assert pool.translate_loc_from_full_to_state(slots).equal(locs)
    assert states.read_states(C4, last).kv.eq(2).all()
    found.evict(["a"], [256])
    assert pool.translate_loc_from_full_to_state(slots)[:256].eq(0).all()
    assert pool.translate_loc_from_full_to_state(slots)[256:].equal(locs[256:])


def fill(found, slots, row, length, seed):
    """Write something different to all that a request owns."""
    pool, layers = found.token_to_kv_pool, range(4)
    for layer in layers:
        pool.set_kv_buffer(layer, slots, rows(len(slots), seed=seed + layer), None)
    for layer, ratio in ((1, 4), (3, 4), (2, 128)):
        ends = slots[ratio - 1 :: ratio]
        pool.set_extra_key_buffer(layer, ends, rows(len(ends), seed=seed + 10 + layer))
    for layer in (1, 3):
        pool.set_index_k(layer, slots[3::4], rows(len(slots[3::4]), 128, seed + 20)[:, 0].float())
        for states in (pool.state_pool(layer), pool.index_state_pool(layer)):
            whole = torch.arange(len(slots)) % 256 < states.ring
            locs = pool.translate_loc_from_full_to_state(slots)[whole]
            width = states.get_states(layer).kv.shape[1]
            states.set_states(layer, locs, *(rows(len(locs), width, seed + i)[:, 0].float() for i in (30, 31)))
    states = pool.state_pool(2)
    locs = states.slots_of_rows(torch.tensor([row]))
    states.set_states(2, locs, *(rows(len(locs), 80, seed + i)[:, 0].float() for i in (40, 41)))


def everything(found, slots, row):
    """All that a request owns, read back by its own slots."""
    pool = found.token_to_kv_pool
    read = [pool.read_kv(layer, slots)[0] for layer in range(4)]
    read += [pool.read_extra_key(layer, slots[ratio - 1 :: ratio]) for layer, ratio in ((1, 4), (3, 4), (2, 128))]
    for layer in (1, 3):
        read.append(pool.read_index_k(layer, slots[3::4]))
        for states in (pool.state_pool(layer), pool.index_state_pool(layer)):
            read += states.read_states(layer, pool.translate_loc_from_full_to_state(slots))
    read += pool.state_pool(2).read_states(2, pool.state_pool(2).slots_of_rows(torch.tensor([row])))
    return read


def test_copies_bring_back_all_that_a_request_owns(cache):
    # G-07
    found = cache()
    pool, (row, slots) = found.token_to_kv_pool, begin(found, "a", 520)
    fill(found, slots, row, 520, seed=0)
    before = everything(found, slots, row)
    copies, by_row = pool.get_cpu_copy(slots), pool.get_request_copy(torch.tensor([row]))
    begin(found, "between", 5)
    found.release("a")
    row, slots = begin(found, "b", 520)
    pool.load_cpu_copy(copies, slots)
    pool.load_request_copy(by_row, torch.tensor([row]))
    assert all(a.equal(b) for a, b in zip(before, everything(found, slots, row), strict=True))
    rows_of = {len(copy) for copy in copies}
    assert rows_of == {520, 520 // 4, 520 // 128, 8 + 8 + 8}  # of a state pool a ring a page


def test_copies_can_be_loaded_piece_by_piece(cache):
    found = cache()
    pool, (row, slots) = found.token_to_kv_pool, begin(found, "a", 520)
    fill(found, slots, row, 520, seed=0)
    before, copies = everything(found, slots, row)[:-2], pool.get_cpu_copy(slots)
    pool.clear()
    for start, end in ((0, 3), (3, 250), (250, 259), (259, 520)):
        pool.load_cpu_copy(pool.cut_copies(copies, slots, start, end), slots[start:end])
    assert all(a.equal(b) for a, b in zip(before, everything(found, slots, row), strict=False))


def test_copies_of_another_request_are_refused(cache):
    found = cache()
    pool, (row, slots) = found.token_to_kv_pool, begin(found, "a", 300)
    copies = pool.get_cpu_copy(slots)
    with pytest.raises(SlotError, match="do not fit"):
        pool.load_cpu_copy(copies, slots[:256])
    with pytest.raises(SlotError, match="3 copies for 1 tensors"):
        pool.load_request_copy(copies[:3], torch.tensor([row]))


def test_moves_take_whole_pages_with_all_that_they_bring(cache):
    found = cache()
    pool, (row, slots) = found.token_to_kv_pool, begin(found, "a", 256)
    fill(found, slots, row, 256, seed=0)
    before = everything(found, slots, row)[:-2]
    _, target = begin(found, "b", 256)
    pool.move_kv_cache(target, slots)
    assert all(a.equal(b) for a, b in zip(before, everything(found, target, row), strict=False))


def test_moves_of_some_tokens_take_their_own_states(cache):
    found = cache()
    pool, (_, slots) = found.token_to_kv_pool, begin(found, "a", 64)
    states, locs = pool.state_pool(1), pool.translate_loc_from_full_to_state(slots)
    states.set_states(1, locs[32:36], *(rows(4, 160, i)[:, 0].float() for i in range(2)))
    kept = states.read_states(1, locs[32:36]).kv
    pool.move_kv_cache(slots[45:48], slots[33:36])
    assert states.read_states(1, locs[45:48]).kv.equal(kept[1:])


def test_transfers_are_told_of_everything_by_global_layer_and_role(cache):
    # G-06, G-07
    found = cache()
    pool = found.token_to_kv_pool
    infos = pool.buffer_infos() + pool.state_infos()
    listed = [(info.name, info.layer_id, info.role, info.space) for info in infos]
    assert listed == [
        *(("kv", layer, "latent", "swa") for layer in range(4)),
        *(("kv", layer, "compressed_latent", "c4") for layer in (1, 3)),
        *(("index_k", layer, "index", "c4") for layer in (1, 3)),
        ("kv", 2, "compressed_latent", "c128"),
        *(("states", layer, "state", "c4_state") for layer in (1, 3)),
        *(("states", layer, "index_state", "c4_state") for layer in (1, 3)),
        ("states", 2, "state", "c128_state"),
    ]
    kept = [buffer for group in found.plan.groups for buffer in group.buffers if buffer.is_kv]
    assert len(infos) == sum(buffer.tensors for buffer in kept)
    items = {(info.role, info.space): (info.item_nbytes, info.stride_nbytes) for info in infos}
    assert items["latent", "swa"] == (26688, 26688)  # 256 · (96 + 8) = 26,624 bytes, in whole rows of 96
    assert items["state", "c4_state"] == (8 * 2 * 2 * 80 * 4,) * 2
    assert items["state", "c128_state"] == (128 * 2 * 80 * 4,) * 2
    pointers, _, _ = pool.get_contiguous_buf_infos()
    assert pointers == [info.pointer for info in pool.buffer_infos()]


def test_online_states_begin_empty_and_a_draft_becomes_the_state(cache):
    found = cache(**ONLINE, **SPECULATIVE)
    states = found.pools["c128.state"]
    found.pools["c128.state"].get_states(C128).kv.fill_(7)  # what a last owner left
    row, _ = begin(found, "a", 10)
    found.prepare_states()
    maximum, total, kv = states.read_states(C128, states.slots_of_rows(torch.tensor([row])))
    assert maximum.eq(-torch.inf).all() and not total.any() and not kv.any()
    banks = states.slots_of_rows(torch.tensor([row]))
    values = torch.arange(5.0).unsqueeze(1).expand(5, 80)
    states.set_states(C128, banks, values, values + 10, values + 20)
    states.commit(torch.tensor([row]), torch.tensor([3]))
    assert [float(part[0, 0]) for part in states.read_states(C128, banks)] == [3.0, 13.0, 23.0]
    states.commit(torch.tensor([row]), torch.tensor([0]))
    assert float(states.read_states(C128, banks).kv[0, 0]) == 23.0
    assert states.empty_slot == (4 + 1 + 2) * 5 - 1


def test_a_state_that_arrives_or_was_prepared_is_not_cleared(cache):
    found = cache(role="decode", decode_extra_slots=2, max_running_requests=2, **ONLINE)
    found.admit("a", 10, arriving=True)
    row = found.req_to_token_pool.row_of("a")
    states = found.pools["c128.state"]
    loc = states.slots_of_rows(torch.tensor([row]))
    states.set_states(C128, loc, *(torch.full((1, 80), 5.0) for _ in range(3)))
    found.prepare_states()
    assert states.read_states(C128, loc).kv.eq(5).all()
    found.release("a")
    found.admit("b", 10)
    found.prepare_states()
    assert not states.read_states(C128, states.slots_of_rows(torch.tensor([1, 2, 3, 4]))).kv[-1].any()


def test_states_of_requests_cannot_be_shared_or_held(cache):
    found = cache(**ONLINE)
    with pytest.raises(SlotError, match="states of requests are not shared in this model"):
        found.admit("a", 10, cached_state=1)
    assert found.req_to_token_pool.row_of("a") is None
    found.check(held=torch.zeros(0, dtype=torch.int64), held_states=())
    with pytest.raises(SlotError, match=r"state slots \[1\] are held"):
        found.check(held_states=[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, s: p.set_extra_key_buffer(0, s, rows(4)), "layer 0 of compress ratio 0"),
        (lambda p, s: p.set_index_k(2, s, torch.zeros(4, 128)), "layer 2 of compress ratio 128 keeps no index keys"),
        (lambda p, s: p.get_attention_compress_states(0), "keeps no states"),
        (lambda p, s: p.get_indexer_compress_states(2), "keeps no states of index keys"),
        (lambda p, s: p.set_kv_buffer(0, s, rows(3), None), "values of shape"),
        (lambda p, s: p.set_kv_buffer(9, s, rows(4), None), "layer 9 has no KV"),
        (lambda p, s: p.parts.pools["c4.state"].get_key_buffer(1), "keeps states of layer 1, no keys and values"),
        (lambda p, s: p.parts.pools["c4.index"].get_value_buffer(1), "keeps index keys of layer 1"),
        (lambda p, s: p.state_pool(1).set_states(1, s, torch.zeros(4, 160)), "1 vectors of a state; give 2"),
        (lambda p, s: p.set_kv_buffer(0, s + 512, rows(4), None), "is not live|were never handed out|not handed out"),
    ],
)
def test_misuse_is_refused_by_name(cache, call, message):
    found = cache()
    _, slots = begin(found, "a", 4)
    with pytest.raises(SlotError, match=message):
        call(found.token_to_kv_pool, slots)


def test_a_router_needs_an_allocator_that_translates(cache):
    found = cache()
    router = found.token_to_kv_pool
    parts = router.parts
    fields = {name: getattr(parts, name) for name in parts.__struct_fields__}
    with pytest.raises(PluginError, match="needs an allocator that translates full slots, not PagedAllocator"):
        DSV4Pool(router.query, Parts(**fields | {"allocator": found.token_to_kv_pool_allocator.full}))


def test_kernels_that_page_by_more_index_keys_are_asked_first(plan, small, registry, monkeypatch):
    # P-11: 32 keys of 4 tokens; pages of 640 tokens divide into them, pages of 256 into two
    class Coarse(IndexPool):
        kernel_page_slots = 32

    monkeypatch.setattr(hooks, "POOLS", {**hooks.POOLS, "dsv4_index": Coarse})
    assert plan(small, page_size=640, max_running_requests=2).spaces["c4"] % 160 == 0
    assert plan(small, page_size=256, max_running_requests=2)
    Coarse.kernel_page_slots = 48
    with pytest.raises(PlanError, match=r"page_size=256 is no multiple of the 192 tokens .* next that works is 384"):
        plan(small, page_size=256, max_running_requests=2)


def test_hot_paths_wait_for_no_device(plan, small):
    from kvdock.builder import build

    found = build(plan(small, max_running_requests=2), device="meta", debug=False)
    pool, slots = found.token_to_kv_pool, torch.zeros(8, dtype=torch.int64, device="meta")
    row = torch.zeros(8, 1, 80, device="meta")
    pool.set_kv_buffer(0, slots, row, None)
    pool.set_extra_key_buffer(C4, slots, row)
    pool.set_index_k(C4, slots, torch.zeros(8, 128, device="meta"))
    pool.state_pool(C4).set_states(C4, pool.translate_loc_from_full_to_state(slots), *(row.new_zeros(8, 160),) * 2)
    pool.request_state_locs(slots, slots)
    pool.move_kv_cache(slots, slots)
    assert pool.read_kv(0, slots)[0].shape == (8, 1, 80)
