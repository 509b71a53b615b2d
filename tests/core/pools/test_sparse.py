"""Sparse layers: an indexer beside keys and values, in the model's own data type."""

import random

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.errors import SlotError  # noqa: E402
from kvdock.model import LayerSpec, MHAParams, ModelSpec, SparseParams  # noqa: E402
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.pools import IndexerPool, MHAPool, SparsePool  # noqa: E402
from kvdock.startup import core_only  # noqa: E402

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24)
HEADS = {"num_kv_heads": 4, "head_dim": 8, "v_head_dim": 8}
PLAIN = LayerSpec(kind="mha", params=MHAParams(**HEADS))
FULL = LayerSpec(kind="sparse", params=SparseParams(**HEADS, index_head_dim=16, index_value=True))
KEYS = LayerSpec(kind="sparse", params=SparseParams(**HEADS, index_head_dim=16, index_value=False))
LAYERS = (PLAIN, KEYS, FULL, KEYS)


def make(layers=LAYERS, page_size=4, tokens=16, tp=1, debug=False, **options):
    registry = core_only()
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=64, dtype="bfloat16")
    given = {"page_size": page_size, "max_total_tokens": tokens, "max_running_requests": 2, **options}
    plan = plan_from((model,), CPU, make_options(given), Parallelism(tp_size=tp), registry, budget_bytes=2**22)
    return plan, build(plan, debug=debug)


def test_all_layers_keep_kv_and_sparse_ones_an_indexer():
    plan, cache = make()
    assert [(g.name, g.kind, g.layers) for g in plan.groups] == [
        ("full", "mha", (0, 1, 2, 3)),
        ("full.index", "sparse_index", (1, 3)),
        ("full.index.1", "sparse_index", (2,)),
    ]
    pool = cache.token_to_kv_pool
    assert type(pool) is SparsePool
    assert [type(part) for part in cache.pools.values()] == [MHAPool, IndexerPool, IndexerPool]
    assert pool.layer_ids == (0, 1, 2, 3)
    assert pool.sparse_layer_ids == (1, 2, 3)


def test_bytes_per_token_are_those_of_heads_and_indexers():
    plan, cache = make()
    # 4 layers of 4 heads of 8 + 8, and indexers of 16: two keys alone, one with values; 2 bytes each
    assert plan.bytes_per_token.kv == 4 * 4 * 16 * 2 + (2 * 16 + 2 * 16) * 2
    assert cache.allocated_bytes() == plan.total_bytes
    # the indexer is the same on every rank and in the model's type, whatever the heads are kept in
    halved, _ = make(tp=2, kv_cache_dtype="fp8_e4m3")
    assert halved.bytes_per_token.kv == 4 * 2 * 16 * 1 + (2 * 16 + 2 * 16) * 2


@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_what_a_slot_owns_moves_and_comes_back_whole(page_size, page_major):
    """Random writes, moves and copies against a dictionary."""
    pool = make(page_size=page_size, tokens=4 * page_size + 2 * page_size, page_major=page_major)[1].token_to_kv_pool
    rng, model = random.Random(page_size), {}
    slots = list(range(page_size, 5 * page_size))

    def write(some):
        loc = torch.tensor(some)
        for layer in pool.layer_ids:
            k, v = (torch.randn(len(some), 4, 8).bfloat16() for _ in range(2))
            pool.set_kv_buffer(layer, loc, k, v)
            index = [torch.randn(len(some), 1, 16).bfloat16() for _ in range(2 if layer == 2 else 1)]
            if layer:
                pool.set_index_buffer(layer, loc, *index)
            for i, slot in enumerate(some):
                model[layer, slot] = [k[i], v[i], *(part[i] for part in index if layer)]

    def read(layer, slot):
        page, offset = divmod(slot, page_size)
        views = [*pool.get_kv_buffer(layer)]
        if layer:
            views.append(pool.get_index_k_buffer(layer))
        if layer == 2:
            views.append(pool.get_index_v_buffer(layer))
        return [view[page, offset] for view in views]

    def check():
        for (layer, slot), expected in model.items():
            assert all(torch.equal(a, b) for a, b in zip(read(layer, slot), expected, strict=True)), (layer, slot)

    for _ in range(3):
        some = rng.sample(slots, min(4, len(slots)))
        write(some)
        targets = rng.sample(slots, len(some))
        pool.move_kv_cache(torch.tensor(targets), torch.tensor(some))
        model.update(
            {(la, t): model[la, s] for la in pool.layer_ids for t, s in dict(zip(targets, some, strict=True)).items()}
        )
        check()
        copies = pool.get_cpu_copy(torch.tensor(targets))
        kept = {(la, t): model[la, t] for la in pool.layer_ids for t in targets}
        write(targets)
        pool.load_cpu_copy(copies, torch.tensor(targets))
        model.update(kept)
        check()


def test_the_transfer_list_holds_every_buffer():
    """G-07: what is transferred is all that tokens own, with layer and role."""
    pool = make()[1].token_to_kv_pool
    found = [(info.role, info.layer_id) for info in pool.buffer_infos()]
    assert found == [
        *[("key", layer) for layer in range(4)],
        *[("value", layer) for layer in range(4)],
        ("index", 1),
        ("index", 3),
        ("index", 2),
        ("index", 2),
    ]
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert len(pointers) == len(lengths) == len(items) == 12
    assert all(length % item == 0 for length, item in zip(lengths, items, strict=True))


def test_a_stage_without_sparse_layers_needs_none_of_it():
    plan, cache = make(layers=(PLAIN, PLAIN))
    assert [g.kind for g in plan.groups] == ["mha"]
    assert type(cache.token_to_kv_pool) is MHAPool


def test_layers_without_an_indexer_say_so():
    pool = make()[1].token_to_kv_pool
    with pytest.raises(SlotError, match=r"layer 0 has no indexer; sparse are the layers \[1, 2, 3\]"):
        pool.get_index_k_buffer(0)
    with pytest.raises(SlotError, match="the indexer of layer 1 keeps keys alone"):
        pool.get_index_v_buffer(1)


@pytest.mark.parametrize(("layer", "with_value"), [(1, True), (2, False)])
def test_values_are_written_where_and_only_where_they_are_kept(layer, with_value):
    pool = make()[1].token_to_kv_pool
    loc, index = torch.tensor([5]), torch.ones(1, 1, 16)
    with pytest.raises(SlotError, match=f"the indexer of layer {layer} keeps keys.*; nothing was written"):
        pool.set_index_buffer(layer, loc, index, index if with_value else None)
    assert not pool.get_index_k_buffer(layer).any()


def test_a_slot_out_of_range_is_named_with_its_layer_in_debug_mode():
    _, cache = make(debug=True)
    with pytest.raises(SlotError, match=r"layer 1: slot 99 is outside 0 … 19; nothing was written"):
        cache.token_to_kv_pool.set_index_buffer(1, torch.tensor([99]), torch.ones(1, 1, 16))
