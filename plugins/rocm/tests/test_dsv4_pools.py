"""DeepSeek V4 on AMD devices: where rows and states lie, what is read back, and what a transfer is told."""

import ctypes
import itertools

import kvdock
import msgspec
import pytest

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

PAGE = 256
RATIOS = (4, 128)
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
ROLES = {"none": 0, "prefill": 0, "decode": 3}
"""Role → rows of requests that arrive, in these tests."""


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def rows_of(cache, *requests):
    return tensor(*(cache.req_to_token_pool.row_of(request) for request in requests))


def test_planned_bytes_are_unique_storages_one_a_layer(cached):
    # P-04
    cache = cached()
    assert cache.allocated_bytes() == cache.plan.total_bytes
    for group in cache.plan.groups:
        pool = cache.pools[group.name]
        assert len({raw.data_ptr() for raw in pool.storages()}) == len(group.layers)
    pool = cache.token_to_kv_pool
    for layer in (1, 2, 3):
        both = pool.get_swa_key_buffer(layer), pool.get_extra_key_buffer(layer)
        assert len({part.untyped_storage().data_ptr() for part in both}) == 1
        assert sum(part.numel() for part in both) == pool.get_key_buffer(layer).numel()


@pytest.mark.parametrize(
    ("requests", "pages", "drafts", "role"),
    [*itertools.product((1, 2, 5), (2, 3), (0, 1, 4), ("none", "prefill")), (1, 2, 0, "decode"), (2, 3, 4, "decode")],
)
def test_the_largest_place_is_inside_its_buffer(requests, pages, drafts, role, planned, small):
    """By brute force over all rows, positions and slots: a buffer ends with it, but for the rows of a guard."""
    given = {"speculative_num_draft_tokens": drafts, **EAGLE} if drafts else {}
    arriving = {"role": role, "decode_extra_slots": ROLES[role]} if ROLES[role] else {"role": role}
    made = planned(max_total_tokens=pages * PAGE, max_running_requests=requests, **arriving, **given)
    cache = kvdock.build(made, device="meta", debug=False)
    pool = cache.token_to_kv_pool
    request_rows, positions = (requests + ROLES[role] + 1), 2 * 256 + 3
    row = torch.arange(request_rows).repeat_interleave(positions)
    position = torch.arange(positions).repeat(request_rows)
    slots = torch.arange((pages + 1) * PAGE)
    rings = set(pool.request_swa_locs(row, position).tolist())
    assert rings == set(range(request_rows * (128 + max(1, drafts) - 1)))
    assert max(rings) + 1 == cache.pools["swa"].row_count
    for name, ratio in (("c4", 4), ("c128", 128)):
        compressed = pool.translate_loc_from_full_to_row(slots, ratio).tolist()
        placed = [place for place in compressed if place >= 0]
        assert len(set(placed)) == len(placed) == len(slots) // ratio
        assert not rings & set(placed)
        assert rings | set(placed) == set(range(cache.pools[name].row_count))
        ring, states = 2 * ratio if ratio == 4 else ratio, cache.pools[f"{name}.state"]
        ring *= 2 if drafts else 1
        found = pool.request_state_locs(row, position, ratio)
        assert set(found.tolist()) == set(range(request_rows * ring))
        guard = states.empty_slot - int(found.max())
        assert ring + 1 <= guard < ring + 1 + ratio


def test_distinct_tokens_have_distinct_rows(cached):
    # P-11: by brute force over all groups of all requests; index keys are paged by 64 of them, and kernels by 16
    cache = cached()
    pool = cache.token_to_kv_pool
    lengths = {"a": 1300, "b": 513, "c": 129, "d": 4}
    slots = {request: cache.admit(request, tokens) for request, tokens in lengths.items()}
    for ratio in RATIOS:
        groups = sum(tokens // ratio for tokens in lengths.values())
        for translate in (pool.translate_loc_from_full_to_row, pool.translate_loc_from_full_to_compressed):
            seen = [place for own in slots.values() for place in translate(own, ratio).tolist() if place >= 0]
            assert len(set(seen)) == len(seen) == groups
    index = type(cache.pools["c4.index"])
    assert cache.pools["c4.index"].query.space.page_size % index.kernel_page_slots == 0


def test_pages_that_kernels_of_the_indexer_do_not_read_are_refused(planned):
    # P-11: 40 keys of 4 tokens a page, and kernels that page by 16 keys
    (choice,) = [found for found in planned(max_total_tokens=1024).outline.pools if found.name == "c4.index"]
    spaces = {**choice.query.spaces, "c4": msgspec.structs.replace(choice.query.space, page_size=40)}
    with pytest.raises(kvdock.PlanError, match=r"page_size=160 is no multiple of the 64 tokens \(16 index keys of 4"):
        choice.cls.buffers(msgspec.structs.replace(choice.query, spaces=spaces))


def test_the_first_calls_while_building_leave_it_empty(cached):
    from kvdock_rocm import warming

    cache = cached()
    before = [raw.clone() for raw in cache.token_to_kv_pool.storages()]
    warming.warm_up(cache)
    assert all(torch.equal(*pair) for pair in zip(cache.token_to_kv_pool.storages(), before, strict=True))
    cache.close()


def test_states_of_ratio_128_are_empty_from_the_first(cached):
    cache = cached()
    c128, c4 = cache.pools["c128.state"], cache.pools["c4.state"]
    for _ in range(2):
        kv, score = c128.get_states(2)
        assert not kv.any()
        assert bool((score == float("-inf")).all())
        kv, score = c4.get_states(1)
        assert not kv.any()
        assert (score == float("-inf")).all(1).nonzero().flatten().tolist() == [c4.empty_slot]
        for pool, layer in ((c128, 2), (c4, 1)):
            width = pool.get_states(layer).kv.shape[1]
            pool.set_states(layer, tensor(5), torch.ones(1, width), torch.ones(1, width))  # of padding
        cache.clear()


def test_a_row_is_read_where_it_was_written(cached):
    cache = cached()
    cache.admit("a", 300)
    slots, (row,) = cache.admit("b", 700), rows_of(cache, "b").tolist()
    pool = cache.token_to_kv_pool
    rows, positions = tensor(row, row, row), tensor(572, 640, 699)
    # Row 2's ring begins at 256; behind 5 rings of 128 lie pages of 64 and of 2 rows, a's in pages 1 and 2.
    assert row == 2
    assert pool.request_swa_locs(rows, positions).tolist() == [256 + 572 - 512, 256, 256 + 699 - 640]
    ends = slots[tensor(3, 127, 698, 699)]
    assert ends.tolist() == [771, 895, 1466, 1467]
    assert pool.translate_loc_from_full_to_row(ends, 4).tolist() == [640 + 192, 640 + 223, -1, 640 + 366]
    assert pool.translate_loc_from_full_to_row(ends, 128).tolist() == [-1, 640 + 6, -1, -1]
    k, group = torch.randn(3, 1, 80).bfloat16(), torch.randn(2, 1, 80).bfloat16()
    for layer in range(4):
        pool.set_swa_key_buffer(layer, rows, positions, k)
    pool.set_extra_key_buffer(1, ends[tensor(0, 3)], group)
    assert torch.equal(pool.read_swa_key(1, rows, positions), k)
    assert torch.equal(pool.get_swa_key_buffer(1)[row, 572 - 512], k[0])
    assert torch.equal(pool.read_extra_key(1, ends[tensor(0, 3)]), group)
    # Slot 771 is in page 3, its row the first there; 1467 is in page 5, at 187.
    assert torch.equal(pool.get_extra_key_buffer(1)[3, 0], group[0])
    assert torch.equal(pool.get_extra_key_buffer(1)[5, 46], group[1])
    assert pool.get_key_buffer(1)[640 + 192, 0, 0].equal(group[0, 0])


def test_both_parts_of_a_row_are_written_alone(cached):
    cache = cached()
    cache.admit("a", 4)  # row 1, whose ring is rows 128 to 255
    pool = cache.pools["c4"]
    nope, rope = torch.randn(2, 1, 64).bfloat16(), torch.randn(2, 1, 16).bfloat16()
    pool.set_mla_kv_buffer(3, tensor(200, 201), nope, rope)
    assert torch.equal(pool.read_kv(3, tensor(201, 200))[0], torch.cat([nope, rope], -1)[[1, 0]])
    found = pool.get_mla_kv_buffer(3, tensor(200, 201), torch.float32)
    assert torch.equal(found[0], nope.float())
    assert torch.equal(found[1], rope.float())
    raw = pool.get_raw_kv_buffer(3)["kv"]
    assert torch.equal(raw[200, :, :64], nope[0])
    assert pool.get_value_buffer(3).data_ptr() == raw.data_ptr()


@pytest.mark.parametrize(("device", "limit"), [("mi300x", 240.0), ("mi355x", 448.0)])
def test_index_keys_are_in_the_encoding_of_the_device(device, limit, cached):
    cache = cached(device=device)
    slots = cache.admit("a", 600)
    pool = cache.token_to_kv_pool
    keys = torch.zeros(2, 128)
    keys[:, 0], keys[0, 1], keys[1, 1] = tensor(8, 16) * limit, limit, -limit
    pool.set_index_k(1, slots[tensor(3, 599)], keys)
    assert torch.equal(pool.read_index_k(1, slots[tensor(3, 599)]), keys)
    scales = pool.get_index_k_with_scale_buffer(1)[1, 64 * 128 :][:4].view(torch.float32)
    assert scales.item() == 8.0


def test_copies_take_rings_by_row_and_groups_by_slot(cached):
    cache = cached()
    slots = {name: cache.admit(name, 300) for name in ("a", "b")}
    pool, (a, b) = cache.token_to_kv_pool, rows_of(cache, "a", "b")
    positions = torch.arange(172, 300)
    k, group = torch.randn(128, 1, 80).bfloat16(), torch.randn(75, 1, 80).bfloat16()
    last = torch.arange(3, 300, 4)
    states = torch.randn(2, 8, 160)
    pool.set_swa_key_buffer(3, a.expand(128), positions, k)
    pool.set_extra_key_buffer(3, slots["a"][last], group)
    pool.set_index_k(3, slots["a"][last], torch.ones(75, 128))
    pool.state_pool(3).set_states(3, pool.request_state_locs(a.expand(8), torch.arange(292, 300), 4), *states)
    by_slot, by_row = pool.get_cpu_copy(slots["a"]), pool.get_request_copy(a.view(1))
    # Rings of 4 layers, states of 2 + 2 and 1; compressed rows of 3 layers, keys and scales of 2.
    assert (len(by_row), len(by_slot)) == (4 + 5, 3 + 4)
    assert {copy.shape[0] for copy in by_slot} == {75, 2}
    pool.load_request_copy(by_row, b.view(1))
    pool.load_cpu_copy(by_slot, slots["b"])
    assert torch.equal(pool.read_swa_key(3, b.expand(128), positions), k)
    assert torch.equal(pool.read_extra_key(3, slots["b"][last]), group)
    assert torch.equal(pool.read_index_k(3, slots["b"][last]), torch.ones(75, 128))
    found = pool.state_pool(3).read_states(3, pool.request_state_locs(b.expand(8), torch.arange(292, 300), 4))
    assert torch.equal(torch.stack(tuple(found)), states)
    again = pool.get_request_copy(b.view(1)) + pool.get_cpu_copy(slots["b"])
    assert all(torch.equal(x, y) for x, y in zip(again, by_row + by_slot, strict=True))
    cut = pool.cut_copies(by_slot, slots["a"], 10, 140)
    assert {copy.shape[0] for copy in cut} == {33, 1}
    with pytest.raises(kvdock.SlotError, match="8 copies for 9 tensors"):
        pool.load_request_copy(by_row[1:], b.view(1))


def test_moving_slots_moves_groups_and_index_keys(cached):
    cache = cached()
    slots = cache.admit("a", 600)
    pool = cache.token_to_kv_pool
    group = torch.randn(1, 1, 80).bfloat16()
    pool.set_extra_key_buffer(1, slots[7:8], group)
    pool.set_index_k(1, slots[7:8], torch.ones(1, 128))
    pool.move_kv_cache(slots[502:504], slots[6:8])
    assert torch.equal(pool.read_extra_key(1, slots[503:504]), group)
    assert torch.equal(pool.read_index_k(1, slots[503:504]), torch.ones(1, 128))


def test_calls_that_cannot_be_served_are_refused(cached):
    cache = cached()
    slots = cache.admit("a", 300)
    pool, k = cache.token_to_kv_pool, torch.ones(1, 1, 80)
    row, one, first = rows_of(cache, "a"), tensor(1), slots[:1]
    refused = [
        (lambda: pool.set_kv_buffer(0, first, k, k), "call set_swa_key_buffer with request rows and positions"),
        (lambda: pool.set_mla_kv_buffer(0, first, k, k), "call set_swa_key_buffer"),
        (lambda: pool.read_kv(0, first), "call read_swa_key"),
        (lambda: pool.get_mla_kv_buffer(0, first), "call read_swa_key"),
        (lambda: pool.translate_loc_from_full_to_swa(first), "call request_swa_locs"),
        (lambda: pool.translate_loc_from_full_to_state(first), "call request_state_locs"),
        (lambda: pool.places_for("swa", first), "call get_request_copy"),
        (lambda: pool.compressed_pool(0), "layer 0 of compress ratio 0 keeps no compressed rows"),
        (lambda: pool.set_extra_key_buffer(0, first, k), "layer 0 of compress ratio 0 keeps no compressed rows"),
        (lambda: cache.pools["swa"].get_compressed_buffer(0), "layer 0 of compress ratio 0 keeps no"),
        (lambda: pool.index_pool(2), "layer 2 of compress ratio 128 keeps no index keys"),
        (lambda: pool.set_swa_key_buffer(7, row, one, k), "layer 7 has no KV in this pool"),
        (lambda: pool.set_swa_key_buffer(0, row, one, k[..., :8]), "values of shape"),
        (lambda: pool.set_swa_key_buffer(0, tensor(4), one, k), "request row 4 belongs to no request"),
        (lambda: pool.set_extra_key_buffer(1, tensor(2048), k), "2048"),
        (lambda: cache.pools["c4"].set_kv_buffer(1, tensor(9999), k), "row 9999 is outside 0 … 1727"),
        (lambda: cache.pools["c4"].set_kv_buffer(2, one, k), "layer 2 has no KV in this pool"),
    ]
    before = [raw.clone() for raw in pool.storages()]
    for call, message in refused:
        with pytest.raises(kvdock.SlotError, match=message):
            call()
    assert all(torch.equal(now, then) for now, then in zip(pool.storages(), before, strict=True))
    padding = tensor(0)
    pool.set_swa_key_buffer(0, padding, one, k)  # dummy writes of a captured batch land in the ring of row 0
    assert pool.get_swa_key_buffer(0)[0, 1].unique().tolist() == [1.0]


def test_descriptors_say_layer_role_and_item(cached):
    # G-06, G-07, P-05
    cache = cached()
    pool = cache.token_to_kv_pool
    by_page = [(i.layer_id, i.role, i.space, i.item_nbytes, i.nbytes // i.item_nbytes) for i in pool.buffer_infos()]
    assert by_page == [
        (1, "compressed_latent", "full", 64 * 160, 17),
        (3, "compressed_latent", "full", 64 * 160, 17),
        (1, "index", "c4", 64 * 132, 17),
        (3, "index", "c4", 64 * 132, 17),
        (2, "compressed_latent", "full", 2 * 160, 17),
    ]
    by_row = [(i.layer_id, i.role, i.space, i.item_nbytes) for i in pool.state_infos()]
    assert by_row == [
        (0, "latent", "swa", 128 * 160),
        (1, "latent", "c4_rows", 128 * 160),
        (3, "latent", "c4_rows", 128 * 160),
        (1, "state", "c4_state", 8 * 320 * 4),
        (3, "state", "c4_state", 8 * 320 * 4),
        (1, "index_state", "c4_state", 8 * 512 * 4),
        (3, "index_state", "c4_state", 8 * 512 * 4),
        (2, "latent", "c128_rows", 128 * 160),
        (2, "state", "c128_state", 128 * 160 * 4),
    ]
    per_token = {(b.name, layer) for b in cache.plan.outline.buffers if b.is_kv for layer in b.layers}
    assert {(i.name, i.layer_id) for i in (*pool.buffer_infos(), *pool.state_infos())} == per_token
    regions = [(r.pointer, r.nbytes, r.item_nbytes) for r in pool.regions()]
    assert regions == [(i.pointer, i.nbytes, i.item_nbytes) for i in pool.buffer_infos()]
    assert all(i.stride_nbytes == i.item_nbytes for i in pool.buffer_infos())


def test_a_stage_describes_its_layers_by_their_global_ids(planned, small):
    # G-06
    config = {**small, "num_hidden_layers": 6, "compress_ratios": [0, 4, 128, 4, 0, 128]}
    made = planned(config, max_total_tokens=1024, parallel={"pp_size": 2, "pp_rank": 1})
    pool = kvdock.build(made, device="cpu", debug=False).token_to_kv_pool
    assert [(i.layer_id, i.role) for i in pool.buffer_infos()] == [
        (3, "compressed_latent"),
        (3, "index"),
        (5, "compressed_latent"),
    ]
    assert {i.layer_id for i in pool.state_infos()} == {3, 4, 5}
    pool.set_swa_key_buffer(4, tensor(1), tensor(5), torch.ones(1, 1, 80))
    assert pool.read_swa_key(4, tensor(1), tensor(5)).unique().tolist() == [1.0]
    with pytest.raises(kvdock.SlotError, match="layer 0 has no KV in this pool"):
        pool.set_swa_key_buffer(0, tensor(1), tensor(5), torch.ones(1, 1, 80))


def test_what_a_transfer_copies_by_these_descriptors_is_the_request(cached):
    """From a prefill worker of 4 rows to a decode worker of 12: other rows, other pages, the same bytes."""
    sides = [cached(role="prefill"), cached(role="decode")]
    sides[0].admit("first", 700)
    slots = [sides[0].admit("a", 600), sides[1].admit("a", 600, arriving=True)]
    pools = [side.token_to_kv_pool for side in sides]
    rows = [side.req_to_token_pool.row_of("a") for side in sides]
    for pool in pools[:1]:
        for info in (*pool.buffer_infos(), *pool.state_infos()):
            noise = torch.randint(1, 100, (info.nbytes,), dtype=torch.uint8)
            ctypes.memmove(info.pointer, noise.data_ptr(), info.nbytes)
    pages = [[int(slot) // PAGE for slot in own[::PAGE]] for own in slots]
    assert pages[0] != pages[1]
    for source, target in zip(pools[0].buffer_infos(), pools[1].buffer_infos(), strict=True):
        for one, other in zip(*pages, strict=True):
            copy_item(source, one, target, other)
    for source, target in zip(pools[0].state_infos(), pools[1].state_infos(), strict=True):
        copy_item(source, rows[0], target, rows[1])
    by_slot = [pool.get_cpu_copy(own) for pool, own in zip(pools, slots, strict=True)]
    by_row = [pool.get_request_copy(tensor(row)) for pool, row in zip(pools, rows, strict=True)]
    for sent, arrived in (by_slot, by_row):
        assert all(torch.equal(raw(x), raw(y)) for x, y in zip(sent, arrived, strict=True))
        assert all(raw(x).any() for x in sent)


def raw(copy):
    return copy.contiguous().view(torch.uint8)


def copy_item(source, one, target, other):
    assert source.item_nbytes == target.item_nbytes
    assert (source.layer_id, source.role, source.name) == (target.layer_id, target.role, target.name)
    ctypes.memmove(
        target.pointer + other * target.stride_nbytes, source.pointer + one * source.stride_nbytes, source.item_nbytes
    )
