"""Ranks that share the tokens between them: each token is on one of them, and all number the slots alike."""

import random

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.errors import SlotError  # noqa: E402
from kvdock.model import DSAParams, LayerSpec, MHAParams, MLAParams, ModelSpec  # noqa: E402
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.startup import core_only  # noqa: E402
from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import seeded  # noqa: E402

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=4))
LATENT = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))
SPARSE = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
KINDS = {"mha": HEADS, "mla": LATENT, "dsa": SPARSE}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
TOKENS = 32


def rank_of(layer, rank, dcp=2, page_size=4, draft=False, debug=False, device="cpu", **options):
    """One rank's cache of two layers, of 32 slots a rank."""
    models = [ModelSpec(name="m", architecture="A", layers=(layer,) * 2, context_length=64, dtype="bfloat16")]
    if draft:
        models.append(
            ModelSpec(name="d", architecture="A", layers=(layer,), context_length=64, dtype="bfloat16", role="draft")
        )
    given = {"page_size": page_size, "max_total_tokens": TOKENS, "max_running_requests": 2, **options}
    given |= EAGLE if draft else {}
    parallel = Parallelism(tp_size=dcp, dcp_size=dcp, dcp_rank=rank)
    plan = plan_from(tuple(models), CPU, make_options(given), parallel, core_only(), budget_bytes=2**24)
    return build(plan, device=device, debug=debug)


def ranks_of(layer, dcp=2, **fields):
    return [rank_of(layer, rank, dcp, **fields) for rank in range(dcp)]


def taken(caches, count=None):
    """The same slots on every rank: all there are, or `count` of them."""
    found = [cache.token_to_kv_pool_allocator.alloc(count or cache.plan.max_total_num_tokens) for cache in caches]
    assert all(torch.equal(slots, found[0]) for slots in found)
    return found[0]


def drawn(pool, layer_id, count, seed):
    """Random rows of keys and values (of latents and rope parts) in the model's type."""
    generator = torch.Generator().manual_seed(seed * 100 + layer_id)
    params = pool.query.group.layers[0][1].params
    widths = (
        (params.head_dim, params.v_head_dim)
        if isinstance(params, MHAParams)
        else (params.kv_lora_rank, params.qk_rope_head_dim)
    )
    return [torch.randn(count, 1, width, generator=generator).bfloat16() for width in widths]


def write(pool, layer_id, slots, rows):
    put = pool.set_kv_buffer if pool.query.kind == "mha" else pool.set_mla_kv_buffer
    put(layer_id, slots, *rows)


def stored(pool, layer_id):
    """Every row that a rank stores of a layer as bytes ``[rows, n]``, the padding page left out."""
    views = [view for name, view in pool.get_raw_kv_buffer(layer_id).items() if name != "index_k"]
    page_size = views[0].shape[1]
    flat = [view.reshape(view.shape[0] * page_size, -1).contiguous().view(torch.uint8) for view in views]
    return torch.cat(flat, 1)[page_size:]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_on_its_owner_and_nowhere_else(kind, dtype, dcp, page_size):
    """Pools of one rank that holds all tokens say what the rows are; of `dcp` ranks one has each, in its row."""
    caches = ranks_of(KINDS[kind], dcp, page_size=page_size, kv_cache_dtype=dtype)
    alone = rank_of(KINDS[kind], 0, 1, page_size=page_size, kv_cache_dtype=dtype, max_total_tokens=dcp * TOKENS)
    slots = taken(caches)
    order = torch.tensor(random.Random(dcp).sample(range(len(slots)), len(slots)))
    for layer_id in (0, 1):
        rows = drawn(alone.token_to_kv_pool, layer_id, len(slots), 1)
        places = torch.arange(len(slots))[order] + page_size
        for cache, where in [(alone, places), *((cache, slots[order]) for cache in caches)]:
            write(cache.token_to_kv_pool, layer_id, where, [row[order] for row in rows])
        whole = stored(alone.token_to_kv_pool, layer_id)
        held = [stored(cache.token_to_kv_pool, layer_id) for cache in caches]
        for place, slot in enumerate(slots.tolist()):
            for rank, own in enumerate(held):
                here = (own == whole[place]).all(1).nonzero().flatten().tolist()
                assert here == ([slot // dcp - page_size] if slot % dcp == rank else [])


@pytest.mark.parametrize("kind", KINDS)
def test_reads_by_slot_answer_for_this_ranks_tokens(kind):
    caches = ranks_of(KINDS[kind], 2)
    slots = taken(caches)
    for rank, cache in enumerate(caches):
        pool = cache.token_to_kv_pool
        rows = drawn(pool, 1, len(slots), 2)
        write(pool, 1, slots, rows)
        found, own = pool.own_rows(slots)
        assert own.tolist() == [slot % 2 == rank for slot in slots.tolist()]
        assert found[own].tolist() == [slot // 2 for slot in slots.tolist() if slot % 2 == rank]
        assert not found[~own].any()
        read = pool.read_kv(1, slots[own])
        keys = torch.cat(rows, -1) if kind != "mha" else rows[0]
        assert torch.equal(read[0], keys[own])
        if kind != "mha":
            assert all(torch.equal(a, b[own]) for a, b in zip(pool.get_mla_kv_buffer(1, slots[own]), rows, strict=True))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dcp", [2, 4])
def test_the_last_slot_is_in_range_on_every_rank(dcp, page_size):
    caches = ranks_of(HEADS, dcp, page_size=page_size, debug=True, draft=True)
    last = taken(caches)[-1:]
    assert last.tolist() == [dcp * (TOKENS + page_size) - 1]
    for rank, cache in enumerate(caches):
        for pool in (cache.token_to_kv_pool, cache.drafts["draft"]):
            write(pool, 0, last, drawn(pool, 0, 1, 3))
        assert bool(stored(cache.token_to_kv_pool, 0)[-1].any()) == (rank == dcp - 1)
        assert stored(cache.drafts["draft"], 0)[-1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_keep_all_tokens_on_every_rank(kind):
    caches = ranks_of(KINDS[kind], 2, draft=True)
    slots = taken(caches)
    for cache in caches:
        pool = cache.drafts["draft"]
        rows = drawn(pool, 0, len(slots), 4)
        write(pool, 0, slots, rows)
        found, own = pool.own_rows(slots)
        assert torch.equal(found, slots) and own.all()
        keys = torch.cat(rows, -1) if kind != "mha" else rows[0]
        assert torch.equal(pool.read_kv(0, slots)[0], keys)
        assert stored(pool, 0).shape[0] >= 2 * TOKENS


def test_index_keys_of_all_tokens_are_on_every_rank():
    caches = ranks_of(SPARSE, 2)
    slots = taken(caches)
    keys = torch.randn(len(slots), 128, generator=torch.Generator().manual_seed(5))
    read = []
    for cache in caches:
        cache.token_to_kv_pool.set_index_k(0, slots, keys)
        read.append(cache.token_to_kv_pool.read_index_k(0, slots))
        assert cache.token_to_kv_pool.get_index_k_with_scale_buffer(0).shape == (2 * 9, 4 * 132)
    assert torch.equal(read[0], read[1])
    assert (read[0] - keys).abs().max() < 0.3


def test_writes_of_other_ranks_tokens_and_of_padding_disturb_nothing():
    cache = rank_of(LATENT, 0)
    pool, slots = cache.token_to_kv_pool, taken([cache])
    write(pool, 0, slots, drawn(pool, 0, len(slots), 6))
    before = stored(pool, 0).clone()
    others = torch.cat([slots[slots % 2 == 1], torch.arange(8)])
    write(pool, 0, others, drawn(pool, 0, len(others), 7))
    assert torch.equal(stored(pool, 0), before)


def test_moves_within_a_rank_take_everything_along():
    caches = ranks_of(SPARSE, 2, debug=True)
    slots = taken(caches)
    keys = torch.randn(len(slots), 128, generator=torch.Generator().manual_seed(8))
    sources, targets = slots[:8], slots[8:16]
    for cache in caches:
        pool = cache.token_to_kv_pool
        rows = drawn(pool, 0, len(slots), 8)
        write(pool, 0, slots, rows)
        pool.set_index_k(0, slots, keys)
        index = pool.read_index_k(0, slots)
        pool.move_kv_cache(targets, sources)
        own = pool.own_rows(targets)[1]
        assert torch.equal(pool.read_kv(0, targets[own])[0], torch.cat(rows, -1)[:8][own])
        rest = slots[16:][pool.own_rows(slots[16:])[1]]
        assert torch.equal(pool.read_kv(0, rest)[0], torch.cat(rows, -1)[rest - slots[0]])
        assert torch.equal(pool.read_index_k(0, targets), index[:8])


def test_moves_to_another_rank_leave_rows_and_are_errors_with_debug():
    for debug in (False, True):
        for cache in ranks_of(HEADS, 2, debug=debug):
            pool, slots = cache.token_to_kv_pool, taken([cache])
            write(pool, 0, slots, drawn(pool, 0, len(slots), 9))
            before = stored(pool, 0).clone()
            # One step on is the other rank's.
            if debug:
                with pytest.raises(
                    SlotError, match=r"slot 8 is of rank 0 of the 2 .* slot 9 of rank 1; move to a slot"
                ):
                    pool.move_kv_cache(slots[1:3], slots[:2])
            else:
                pool.move_kv_cache(slots[1:3], slots[:2])
            assert torch.equal(stored(pool, 0), before)


@pytest.mark.parametrize("kind", KINDS)
def test_host_copies_hold_this_ranks_rows_and_come_back_elsewhere(kind):
    """Twelve tokens in pages of 8 of two ranks go to other pages, each to the same place in its page."""
    for cache in ranks_of(KINDS[kind], 2, debug=True):
        pool, slots = cache.token_to_kv_pool, taken([cache])
        write(pool, 0, slots, drawn(pool, 0, len(slots), 10))
        here, there = slots[:12], slots[16:28]
        own = pool.own_rows(here)[1]
        before = pool.read_kv(0, here[own])
        copies = pool.get_cpu_copy(here)
        whole = len(pool.whole_views())
        assert [len(copy) for copy in copies] == [6] * (len(copies) - whole) + [12] * whole
        pool.verify_copies(copies, there)
        pool.load_cpu_copy(copies, there)
        after = pool.read_kv(0, there[own])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        with pytest.raises(SlotError, match="copies do not fit"):
            pool.load_cpu_copy(copies, slots[16:26])


def test_debug_checks_know_the_slots_of_all_ranks():
    for cache in ranks_of(HEADS, 2, debug=True):
        pool, slots = cache.token_to_kv_pool, taken([cache], 16)
        with pytest.raises(SlotError, match=r"layer 0: .*are written"):
            write(pool, 0, slots[-1:] + 1, drawn(pool, 0, 1, 11))
        with pytest.raises(SlotError, match=r"layer 0: slot 72 is outside 0 … 71"):
            write(pool, 0, torch.tensor([2 * (TOKENS + 4)]), drawn(pool, 0, 1, 11))


@pytest.mark.parametrize("kind", KINDS)
def test_the_hot_paths_never_wait(kind):
    pool = rank_of(KINDS[kind], 1, device="meta").token_to_kv_pool
    slots = torch.arange(16, device="meta")
    write(pool, 0, slots, [row.to("meta") for row in drawn(pool, 0, 16, 12)])
    pool.move_kv_cache(slots, slots)
    pool.read_kv(0, slots)
    rows, own = pool.own_rows(slots)
    assert (rows.shape, own.dtype) == ((16,), torch.bool)
    if kind == "dsa":
        pool.set_index_k(0, slots, torch.empty(16, 128, device="meta"))


def test_slots_of_request_tables_stay_int32():
    pool = rank_of(HEADS, 1).token_to_kv_pool
    rows, own = pool.own_rows(torch.tensor([8, 9, 10, 11], dtype=torch.int32))
    assert (rows.dtype, rows.tolist(), own.tolist()) == (torch.int32, [0, 4, 0, 5], [False, True, False, True])


@pytest.mark.parametrize("page_major", [False, True])
def test_an_item_of_a_transfer_is_a_page_of_all_ranks(page_major):
    """8 pages and padding: a page holds 4 rows of 272 bytes here, and 8 index keys of 132 bytes each."""
    options = {"page_major": page_major, "attention_backend": "torch"}
    pool = rank_of(SPARSE, 0, **options).token_to_kv_pool
    infos = {(info.name, info.layer_id): info for info in pool.buffer_infos()}
    assert {key: info.item_nbytes for key, info in infos.items()} == {
        (name, layer): nbytes for name, nbytes in (("kv", 4 * 272), ("index_k", 8 * 132)) for layer in (0, 1)
    }
    assert all(info.nbytes == 9 * info.item_nbytes for info in infos.values())
    slots = torch.arange(8, 16)
    pool.set_index_k(0, slots, torch.ones(8, 128))
    pages = pool.get_index_k_with_scale_buffer(0)
    info = infos["index_k", 0]
    start = info.pointer + info.stride_nbytes - pages.data_ptr()
    item = pages.view(-1)[start : start + info.item_nbytes]
    assert item.count_nonzero() == pages.count_nonzero() > 0
    per_item = sum(region.item_nbytes for region in pool.regions())
    assert per_item == 2 * (4 * 272 + 8 * 132)
    assert sum(region.nbytes for region in pool.regions()) == 9 * per_item


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_finds_every_value_of_this_ranks_tokens(kind):
    """The ranks check different tokens of the same requests, together each once in each of two layers."""
    reports = [drive(cache, seeded(3, 8, 40), seed=3) for cache in (*ranks_of(KINDS[kind]), alone_of(KINDS[kind]))]
    assert all(report.ok for report in reports)
    assert reports[0].tokens_written == reports[1].tokens_written > 0
    first, second, whole = (report.checks for report in reports)
    assert min(first, second) > 0
    assert first + second == whole


def alone_of(layer):
    """One rank that holds all tokens, in pages of the two ranks'."""
    return rank_of(layer, 0, 1, page_size=8, max_total_tokens=2 * TOKENS)
