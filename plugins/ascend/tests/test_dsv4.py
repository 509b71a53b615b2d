"""DeepSeek V4 on an NPU: sizes by hand, where tokens lie, and all spaces in step."""

import importlib
import random
from pathlib import Path

import kvdock
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdock.builder import build
from kvdock.startup import core_only
from kvdock_ascend import device, hooks

family = pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

variant = importlib.import_module("kvdock_ascend.variants.dsv4")
FLASH = Path(__file__).parents[3] / "tests" / "models" / "deepseek-v4-flash.json"
SMALL = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "sliding_window": 128,
    "index_head_dim": 128,
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "compress_ratios": [0, 4, 128, 4],
}
CARD = msgspec.structs.replace(device.catalogue()["910c"], granularity_bytes=1)
OTHERS = ("c4", "c128", "c4_state", "c128_state")


def registry(with_variant=True):
    found = core_only()
    found.add(hooks, name="ascend", tier="hardware")
    found.add(family, name="dsv4", tier="family")
    if with_variant:
        found.add(variant, name="ascend.dsv4", tier="variant")
    return found


def planned(config=None, budget=2**27, with_variant=True, **options):
    options = {"max_running_requests": 4, "swa_full_tokens_ratio": 0.5, **options}
    return kvdock.plan(
        config or SMALL, device=CARD, options=options, budget_bytes=budget, registry=registry(with_variant)
    )


def cached(**options):
    return build(planned(**{"max_total_tokens": 4096, **options}), device="cpu", debug=True)


def objections(**options):
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        planned(**options)
    return dict(caught.value.objections)


def spaces_by_hand(tokens, requests, page):
    """n, n/r in whole pages and a page a request, and max(2, ceil(1.8 r / page) + 1) pages of states a request."""
    pages = {128: (2, 3), 256: (2, 2)}[page]
    return {
        "full": tokens,
        "c4": -(-tokens // 4 // page) * page + requests * page,
        "c128": -(-(tokens // 128) // page) * page + requests * page,
        "c4_state": pages[0] * requests * page,
        "c128_state": pages[1] * requests * page,
    }


@pytest.mark.parametrize(("page", "requests"), [(128, 4), (128, 7), (256, 3)])
def test_spaces_have_pages_of_the_global_size(page, requests):
    made = planned(max_total_tokens=8192, page_size=page, max_running_requests=requests)
    wanted = spaces_by_hand(8192, requests, page)
    assert {name: made.spaces[name] for name in wanted} == wanted
    assert {made.outline.spaces[name].page_size for name in (*wanted, "swa")} == {page}


def test_149_requests_have_a_page_of_compressed_rows_each():
    """1,500,032 tokens hold 11,719 rows of 128 in 92 pages; with 149 requests there are 241."""
    made = planned(FLASH, budget=2**35, max_total_tokens=1_500_032, max_running_requests=149, swa_full_tokens_ratio=0.1)
    assert made.max_total_num_tokens == 1_500_032
    assert made.spaces["c128"] == (92 + 149) * 128
    assert made.spaces["c4"] == (2930 + 149) * 128


def test_rows_are_512_columns_of_bfloat16():
    """The published model: 43 layers, 21 of ratio 4 and 20 of 128; 512 columns, index keys of 128 + 2 bytes."""
    made = planned(FLASH, budget=2**34, max_total_tokens=131_072, max_running_requests=8)
    found = {
        (group.name, buffer.name): (buffer.shape[0], buffer.shape[2:], buffer.dtype)
        for group in made.groups
        for buffer in group.buffers
    }
    assert found == {
        ("swa", "kv"): (43, (1, 512), "bfloat16"),
        ("c4", "kv"): (21, (1, 512), "bfloat16"),
        ("c4.index", "index_k"): (21, (1, 128), "int8"),
        ("c4.index", "index_scale"): (21, (1, 1), "float16"),
        ("c4.state", "states"): (21, (2 * 2 * 512,), "float32"),
        ("c4.index_state", "states"): (21, (2 * 2 * 128,), "float32"),
        ("c128", "kv"): (20, (1, 512), "bfloat16"),
        ("c128.state", "states"): (20, (2 * 512,), "float32"),
    }
    c4 = next(group for group in made.groups if group.name == "c4")
    assert c4.buffers[0].nbytes == 21 * (made.spaces["c4"] + 128) * 512 * 2
    assert {group.pool_cls.plugin for group in made.groups} == {"ascend.dsv4"}
    assert (made.allocator_cls.name, made.request_pool_cls.name) == ("DSV4NpuAllocator", "DSV4NpuReqToTokenPool")
    values = made.outline.options.values
    assert (values.page_size, values.kv_cache_dtype, values.prefix_cache) == (128, "bfloat16", False)


def test_planned_bytes_are_unique_storages():
    """P-04"""
    cache = cached()
    assert cache.allocated_bytes() == cache.plan.total_bytes
    for group in cache.plan.groups:
        pool = cache.pools[group.name]
        assert len({raw.data_ptr() for raw in pool.storages()}) == len(group.buffers)
        assert all(pool.all_layers(buffer.name).is_contiguous() for buffer in group.buffers)


def test_without_the_variant_the_familys_rows_are_refused():
    with pytest.raises(kvdock.UnsupportedCombination, match=r"PackedPool \(kind dsv4\).*kvdock-ascend\[dsv4\]"):
        planned(with_variant=False, max_total_tokens=4096)


def test_what_the_form_does_not_have_is_refused():
    assert "a page of compressed rows here belongs to one request" in objections(prefix_cache=True)["ascend.dsv4"]
    online = objections(plugin_options={"dsv4": {"online_compress": True}})
    assert "online_compress=true is no form" in online["ascend.dsv4"]
    # there is no host tier here, so no buffers that could run out.
    with pytest.raises(kvdock.PlanError):
        planned(hisparse=True)


def test_a_plan_is_the_same_read_from_a_file():
    made = planned(max_total_tokens=4096)
    again = kvdock.CachePlan.from_json(made.to_json(), registry=registry())
    assert again.total_bytes == made.total_bytes


def test_a_bundle_has_a_place_for_each_token_and_each_group():
    """A prompt of 300 tokens: 75 groups of 4, 2 of 128; of states the last 44 + 128 and the last 44 tokens."""
    cache = cached()
    allocator = cache.token_to_kv_pool_allocator
    zero, seq, none = torch.tensor([0]), torch.tensor([300]), torch.tensor([-1], dtype=torch.int32)
    found = allocator.alloc_extend_bundle(zero, [0], seq, [300], none, 300, owners=["a"])
    assert {part.dtype for part in found} == {torch.int32}
    assert [len(part) for part in found] == [300, 300, 75, 2, 172, 44]
    assert torch.equal(found.swa, allocator.translate(found.full).int())
    # All six spaces were empty: the first pages, and c4's next one is not needed before token 512.
    assert found.c4.tolist() == list(range(128, 203))
    assert found.c128.tolist() == [128, 129]
    # 3 full pages, 2 of states for c4: page 2 uses the first again; c128 has one for each.
    assert found.c4_state.tolist() == [*range(256, 384), *range(128, 172)]
    assert found.c128_state.tolist() == list(range(3 * 128, 3 * 128 + 44))
    step = allocator.alloc_decode_bundle(torch.tensor([304]), [304], found.full[-1:] + 3)
    assert [len(part) for part in step] == [1, 1, 1, 0, 1, 1]
    assert step.c4.tolist() == [203]


@pytest.mark.parametrize(
    ("prefix", "seq", "c4", "c128", "s4", "s128"),
    [
        (0, 0, 0, 0, 0, 0),
        (0, 3, 0, 0, 3, 3),
        (0, 128, 32, 1, 128, 0),
        (127, 128, 1, 1, 1, 0),
        (100, 700, 150, 5, 188, 60),
    ],
)
def test_places_are_counted_as_the_rules_say(prefix, seq, c4, c128, s4, s128):
    """``seq // r − prefix // r`` groups; the tail is ``seq % 128`` tokens, and for c4 the 128 before."""
    import numpy as np
    from kvdock_ascend.dsv4.allocator import places_in

    arrays = np.array([prefix]), np.array([seq])
    found = {name: places_in(name, *arrays) for name in OTHERS}
    assert [len(found[name]) for name in OTHERS] == [c4, c128, s4, s128]
    for name, ratio in (("c4", 4), ("c128", 128)):
        assert [(prefix + int(place)) % ratio for place in found[name]] == [ratio - 1] * len(found[name])


def test_tables_say_where_a_request_lies():
    cache = cached()
    slots = cache.admit("a", 300)
    table = cache.req_to_token_pool
    row, allocator = table.row_of("a"), cache.token_to_kv_pool_allocator
    found = table.tables
    columns = table.req_to_token.shape[1]
    assert {name: tuple(part.shape) for name, part in found.items()} == {
        "swa": (5, columns),
        "c4": (5, columns // 4),
        "c128": (5, columns // 128),
        "c4_state": (5, columns),
        "c128_state": (5, columns),
    }
    assert {part.dtype for part in found.values()} == {torch.int32}
    bundle = allocator.bundle(slots, [0], [300])
    assert torch.equal(found["swa"][row, :300], bundle.swa)
    assert torch.equal(found["c4"][row, :75], bundle.c4)
    assert torch.equal(found["c128"][row, :2], bundle.c128)
    assert torch.equal(found["c4_state"][row, 128:300], bundle.c4_state)
    assert not found["c4_state"][row, :128].any()
    assert torch.equal(found["c128_state"][row, 256:300], bundle.c128_state)
    assert not found["c128_state"][row, :256].any()


def test_distinct_tokens_have_distinct_rows():
    """P-11: by brute force over all groups of all requests."""
    cache = cached()
    lengths = {"a": 700, "b": 513, "c": 129, "d": 4}
    pool = cache.token_to_kv_pool
    for ratio in (4, 128):
        seen = []
        for request, tokens in lengths.items():
            slots = cache.admit(request, tokens) if ratio == 4 else None
            row = cache.req_to_token_pool.row_of(request)
            slots = cache.req_to_token_pool.req_to_token[row, :tokens]
            places = pool.translate_loc_from_full_to_compressed(slots, ratio)
            seen += places[places >= 0].tolist()
        assert len(seen) == sum(tokens // ratio for tokens in lengths.values())
        assert len(set(seen)) == len(seen)
        assert min(seen) >= 128


def free_sizes(cache):
    allocator = cache.token_to_kv_pool_allocator
    return {name: part.available_size() for name, part in allocator.parts.allocators.items()}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("way", ["short", "raises"])
def test_a_failure_in_one_space_takes_nothing_of_the_others(name, way, monkeypatch):
    """The fourth of the inner allocators, or any other, gives nothing: those before it have what they had."""
    cache = cached()
    cache.admit("a", 300)
    before, allocator = free_sizes(cache), cache.token_to_kv_pool_allocator

    def fail(count, owners=None):
        if way == "raises":
            raise RuntimeError("the device went away")

    monkeypatch.setattr(allocator.parts.allocators[name], "alloc_pages", fail)
    with pytest.raises((RuntimeError, kvdock.SlotError), match=f"went away|space '{name}' handed out less"):
        cache.admit("b", 600)
    assert free_sizes(cache) == before
    monkeypatch.undo()
    assert cache.admit("b", 600) is not None
    cache.check()


def test_a_space_that_is_short_is_an_answer(monkeypatch):
    cache = cached()
    others = cache.token_to_kv_pool_allocator.parts.allocators
    held = others["c128_state"].alloc(others["c128_state"].available_size() - 128)
    before = free_sizes(cache)
    assert cache.admit("a", 300) is None
    assert free_sizes(cache) == before
    others["c128_state"].free(held)
    assert cache.admit("a", 300) is not None


@pytest.mark.parametrize("way", ["release", "free", "free_pages", "free in a group", "close"])
def test_everything_goes_back_with_the_full_pages(way):
    cache = cached()
    before = free_sizes(cache)
    slots = cache.admit("a", 1000)
    allocator = cache.token_to_kv_pool_allocator
    assert all(free_sizes(cache)[name] < before[name] for name in before)
    if way == "release":
        cache.release("a")
    elif way == "free":
        allocator.free(slots)
    elif way == "free_pages":
        allocator.free_pages(slots[::128] // 128)
    elif way == "free in a group":
        allocator.free_group_begin()
        allocator.free(slots[:500])
        allocator.free(slots[500:])  # both name the page of tokens 384 to 511
        allocator.free_group_end()
    else:
        cache.release("a")
        cache.close()
    assert free_sizes(cache) == before
    allocator.check(held=slots[:0])


def test_what_is_trimmed_is_taken_again():
    cache = cached()
    cache.admit("a", 600)
    before = free_sizes(cache)
    cache.trim(["a"], [130])
    # 3 of 5 full pages; the second of c4 began at token 512; the third of c128's states is the third full page's.
    gone = {name: free_sizes(cache)[name] - before[name] for name in before}
    assert gone == {"full": 384, "swa": 384, "c4": 128, "c128": 0, "c4_state": 0, "c128_state": 128}
    cache.release("a")
    cache.close()


def test_a_request_does_not_go_on_behind_anothers_pages():
    cache = cached()
    slots = cache.admit("a", 256)
    before = free_sizes(cache)
    with pytest.raises(kvdock.SlotError, match="cannot go on behind 256 tokens that are another's"):
        cache.admit("b", 400, prefix=slots)
    assert free_sizes(cache) == before


def test_a_restore_takes_back_every_space():
    cache = cached()
    allocator = cache.token_to_kv_pool_allocator
    before, state = free_sizes(cache), allocator.backup_state()
    none = torch.tensor([-1])
    allocator.alloc_extend(torch.tensor([0]), [0], torch.tensor([900]), [900], none, 900, owners=["a"])
    allocator.restore_state(state)
    assert free_sizes(cache) == before
    with pytest.raises(kvdock.SlotError, match="another's"):
        allocator.alloc_extend(torch.tensor([128]), [128], torch.tensor([129]), [129], none + 256, 1, owners=["a"])


def test_states_begin_empty_and_read_as_they_were_written():
    cache = cached()
    pool = cache.token_to_kv_pool
    slots = cache.admit("a", 200)
    states = pool.state_pool(2)
    row, score = states.read_states(2, torch.tensor([0]))
    assert not row.any()
    assert bool((score == float("-inf")).all())
    rows = torch.tensor([cache.req_to_token_pool.row_of("a")])
    loc = pool.request_state_locs(rows, torch.tensor([150]))
    assert torch.equal(loc, pool.translate_loc_from_full_to_state(slots[150:151], "c128_state"))
    states.set_states(2, loc, torch.ones(1, 80), torch.full((1, 80), 2.0))
    assert states.read_states(2, loc).score.unique().tolist() == [2.0]
    with pytest.raises(kvdock.SlotError, match="1 vectors of a state"):
        states.set_states(2, loc, torch.ones(1, 80))


def test_index_keys_have_a_scale_each():
    cache = cached()
    cache.admit("a", 600)
    pool = cache.token_to_kv_pool.index_pool(1)
    keys = torch.randn(3, 128) * torch.tensor([[1.0], [100.0], [0.0]])
    loc = torch.tensor([130, 131, 132])
    pool.set_index_k(1, loc, keys)
    found = pool.read_index_k(1, loc)
    step = keys.abs().amax(-1, keepdim=True) / 127
    assert bool(((found - keys).abs() <= step * 0.51 + 127 * step * 2**-10).all())
    assert pool.get_key_buffer(1).dtype is torch.int8
    with pytest.raises(kvdock.SlotError, match=r"give torch.int8 and torch.float16"):
        pool.set_index_k_scale_buffer(1, loc, keys, step)


@given(st.integers(0, 2**32), st.sampled_from([1024, 2048, 4096]))
def test_no_admitted_request_can_hang(seed, tokens):
    """While full and sliding pages are free, none of the other spaces is short, whatever the requests are.

    As many requests as there are rows grow by chunks and by single tokens, and end, in any order.
    """
    rng = random.Random(seed)
    cache = build(
        planned(max_total_tokens=tokens, max_running_requests=4, swa_full_tokens_ratio=1.0), device="cpu", debug=False
    )
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    live, name = {}, 0
    for _ in range(60):
        if len(live) < 4 and rng.random() < 0.4:
            length = rng.choice([1, 127, 128, 129, rng.randrange(1, 600)])
            needed = -(-length // 128) * 128
            found = cache.admit(name, length)
            assert (found is not None) == (
                needed <= allocator.full_available_size() + (needed if found is not None else 0)
            )
            if found is not None:
                live[name] = length
            name += 1
        elif live and rng.random() < 0.25:
            ended = rng.choice(sorted(live))
            cache.release(ended)
            del live[ended]
        elif live:
            request = rng.choice(sorted(live))
            grown = min(2048 - live[request], rng.choice([1, 1, rng.randrange(1, 300)]))
            prefix, seq, row = live[request], live[request] + grown, table.row_of(request)
            pages = -(-seq // 128) - -(-prefix // 128)
            room = pages * 128 <= allocator.full_available_size()
            last = table.req_to_token[row, prefix - 1 : prefix]
            batch = torch.tensor([prefix]), [prefix], torch.tensor([seq]), [seq], last, grown
            slots = allocator.alloc_extend(*batch, owners=[request])
            assert (slots is not None) == room
            if slots is not None:
                table.write([row], [prefix], [seq], slots)
                live[request] = seq
    cache.check()
    for request in live:
        cache.release(request)
    assert free_sizes(cache) == {name: cache.plan.spaces[name] for name in free_sizes(cache)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 256},
        {"state_dtype": "bfloat16", "swa_full_tokens_ratio": 1.0},
        {"role": "decode"},
        {"role": "prefill"},
        {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4},
        {"plugin_options": {"ascend": {"align_transfers": True}}, "max_running_requests": 2},
    ],
)
def test_requests_run_through_it_and_read_what_they_wrote(options):
    from kvdock.testing.driver import drive
    from kvdock.testing.trace import Arrival

    arrivals = [Arrival(timestamp_ms=float(i), input_length=90 + 150 * i, output_length=60) for i in range(5)]
    report = drive(cached(**options), arrivals, seed=1)
    assert report.finished == 5
    assert report.checks
    assert not report.problems
    assert report.shared_tokens == 0


def test_drafts_keep_a_window_of_their_own():
    """One layer more, in sliding slots alone, at the size of the target's."""
    made = planned(
        max_total_tokens=4096,
        speculative_algorithm="EAGLE",
        speculative_num_steps=2,
        speculative_num_draft_tokens=3,
    )
    drafts = [group for group in made.groups if group.worker != "target"]
    assert [(group.space, group.pool_cls.name, group.layers) for group in drafts] == [("swa", "NpuRowsPool", (0,))]


@pytest.mark.parametrize("name", ["swa", "c4", "c4.index", "c4.state", "c128.state"])
def test_every_part_writes_through_the_operators(npu_pool, name):
    cache = build(planned(max_total_tokens=4096), device="cpu", debug=False)
    pool, fake = npu_pool(cache, name)
    layer, loc = pool.layer_ids[-1], torch.tensor([200, -1, 130])
    if name == "c4.index":
        keys = torch.randn(3, 128)
        pool.set_index_k(layer, loc, keys)
        assert torch.equal(pool.read_index_k(layer, loc[:1]), pool.read_index_k(layer, torch.tensor([200])))
    elif name.endswith("state"):
        columns = pool.get_states(layer).kv.shape[-1]
        rows = torch.randn(3, columns)
        pool.set_states(layer, loc, rows, -rows)
        assert torch.equal(pool.read_states(layer, loc[::2]).score, -rows[::2])
    else:
        rows = torch.randn(3, 1, 80).bfloat16()
        pool.set_kv_buffer(layer, loc, rows)
        assert torch.equal(pool.read_kv(layer, loc[::2])[0], rows[::2])
    assert fake.calls["npu_scatter_nd_update_"] == (2 if name == "c4.index" else 1)
    copies = pool.get_cpu_copy(loc)
    assert {copy.shape[0] for copy in copies} == {2}
    pool.load_cpu_copy(copies, torch.tensor([300, -1, 301]))
    pool.move_kv_cache(torch.tensor([400, 401]), torch.tensor([300, -1]))
    again = pool.get_cpu_copy(torch.tensor([400]))
    assert all(torch.equal(part, copy[:1]) for part, copy in zip(again, copies, strict=True))


def test_calls_that_do_not_fit_are_refused():
    cache = cached()
    cache.admit("a", 300)
    pool, loc = cache.token_to_kv_pool, torch.tensor([0])
    refused = [
        (lambda: pool.get_index_k_with_scale_buffer(1), "lie apart"),
        (lambda: pool.compressed_pool(0), "keeps no compressed rows"),
        (lambda: pool.index_pool(2), "keeps no index keys"),
        (lambda: pool.index_pool(1).set_kv_buffer(1, loc, None, None), "write them with set_index_k"),
        (lambda: pool.state_pool(1).set_kv_buffer(1, loc, None, None), "write them with set_states"),
        (lambda: pool.index_pool(1).set_index_k(2, loc, torch.ones(1, 128)), "layer 2"),
        (lambda: pool.set_kv_buffer(0, loc, torch.ones(1, 1, 8), None), "values of shape"),
        (lambda: cache.token_to_kv_pool_allocator.translate_beside("c8", loc), "no space 'c8' lies beside"),
    ]
    for call, message in refused:
        with pytest.raises(kvdock.SlotError, match=message):
            call()
    assert pool.get_extra_key_buffer(1).shape == pool.compressed_pool(1).get_key_buffer(1).shape
    assert pool.get_swa_key_buffer(0).shape[1:] == (128, 1, 80)
    assert pool.get_request_copy(torch.tensor([1])) == []


def test_parts_of_other_forms_do_not_fit_each_other():
    """The router asks for its allocator, and the tables for theirs."""
    cache = cached()
    choice = cache.plan.outline.routers["target"]
    parts = msgspec.structs.replace(cache.token_to_kv_pool.parts, allocator=cache.token_to_kv_pool_allocator.full)
    with pytest.raises(kvdock.PluginError):
        choice.cls(choice.query, parts)
    table = cache.plan.outline.request_pool
    alone = table.cls(table.query, cache.req_to_token_pool.parts)
    rows = alone.alloc(["a"])
    with pytest.raises(kvdock.PluginError, match="no allocator says where tokens lie"):
        alone.write(rows, [0], [1], torch.tensor([128]))
