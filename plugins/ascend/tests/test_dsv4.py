"""DeepSeek V4 on an NPU: sizes by hand, what its pools keep, and runs."""

from pathlib import Path

import kvdock
import msgspec
import pytest

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

FLASH = Path(__file__).parents[3] / "tests" / "models" / "deepseek-v4-flash.json"


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
def test_spaces_have_pages_of_the_global_size(page, requests, planned):
    made = planned(max_total_tokens=8192, page_size=page, max_running_requests=requests)
    wanted = spaces_by_hand(8192, requests, page)
    assert {name: made.spaces[name] for name in wanted} == wanted
    assert {made.outline.spaces[name].page_size for name in (*wanted, "swa")} == {page}


def test_149_requests_have_a_page_of_compressed_rows_each(planned):
    """1,500,032 tokens hold 11,719 rows of 128 in 92 pages; with 149 requests there are 241."""
    made = planned(FLASH, budget=2**35, max_total_tokens=1_500_032, max_running_requests=149, swa_full_tokens_ratio=0.1)
    assert made.max_total_num_tokens == 1_500_032
    assert made.spaces["c128"] == (92 + 149) * 128
    assert made.spaces["c4"] == (2930 + 149) * 128


def test_rows_are_512_columns_of_bfloat16(planned):
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


def test_planned_bytes_are_unique_storages(cached):
    """P-04"""
    cache = cached()
    assert cache.allocated_bytes() == cache.plan.total_bytes
    for group in cache.plan.groups:
        pool = cache.pools[group.name]
        assert len({raw.data_ptr() for raw in pool.storages()}) == len(group.buffers)
        assert all(pool.all_layers(buffer.name).is_contiguous() for buffer in group.buffers)


def test_without_the_variant_the_familys_rows_are_refused(planned):
    with pytest.raises(kvdock.UnsupportedCombination, match=r"PackedPool \(kind dsv4\).*kvdock-ascend\[dsv4\]"):
        planned(with_variant=False, max_total_tokens=4096)


@pytest.mark.parametrize("dtype", ["fp8", "mxfp8", "nvfp4", "float32"])
def test_types_that_the_form_has_not_are_refused_without_advice_to_install_it(dtype, planned):
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        planned(max_total_tokens=4096, kv_cache_dtype=dtype)
    assert "install" not in str(caught.value)
    said = dict(pair for pair in caught.value.objections if pair[1].startswith("kv_cache_dtype="))
    assert f"kv_cache_dtype={dtype} (" in said["ascend.dsv4"]
    assert f"kv_cache_dtype={dtype}, " in said["ascend"]
    assert said["ascend"].endswith("leave kv_cache_dtype out")
    assert said["ascend.dsv4"].endswith("leave kv_cache_dtype out, which gives bfloat16")
    assert planned(max_total_tokens=4096, kv_cache_dtype="float16").total_bytes > 0


def test_without_the_variant_the_layout_is_the_one_reason(planned):
    with pytest.raises(kvdock.UnsupportedCombination) as caught:
        planned(with_variant=False, max_total_tokens=4096)
    said = [reason for _, reason in caught.value.objections if reason != "declined"]
    assert len(said) == 1
    assert said[0].endswith("pip install 'kvdock-ascend[dsv4]'")


def test_what_the_form_does_not_have_is_refused(planned, dsv4_objections):
    assert "a page of compressed rows here belongs to one request" in dsv4_objections(prefix_cache=True)["ascend.dsv4"]
    online = dsv4_objections(plugin_options={"dsv4": {"online_compress": True}})
    assert "online_compress=true is no form" in online["ascend.dsv4"]
    large = dsv4_objections(page_size=2048, max_running_requests=1)
    assert "reads pages of at most 1024 tokens; give 128" in large["ascend.dsv4"]
    # there is no host tier here, so no buffers that could run out.
    with pytest.raises(kvdock.PlanError, match="hisparse=true keeps rows on the host, which no kernel of 910c reads"):
        planned(hisparse=True)


@pytest.mark.parametrize("asked", [True, False])
def test_floats_of_index_keys_are_refused_however_they_are_asked_for(planned, dsv4_objections, asked):
    """Keys are integers here: the family's setting is no more read than the option that it stands for."""
    dtype = "fp4" if asked else "fp8_e4m3"
    with pytest.raises(kvdock.KVDockError, match=f"nothing in this plan reads index_dtype='{dtype}'"):
        planned(index_dtype=dtype)
    found = dsv4_objections(plugin_options={"dsv4": {"fp4_indexer": asked}})
    assert found["ascend.dsv4"].startswith(f"fp4_indexer={str(asked).lower()} says which floats index keys are")


def test_the_setting_of_state_dtype_is_the_option(planned):
    by_setting, by_option, plain = (
        planned(max_total_tokens=4096, **more)
        for more in ({"plugin_options": {"dsv4": {"state_dtype": "bfloat16"}}}, {"state_dtype": "bfloat16"}, {})
    )
    assert by_setting.total_bytes == by_option.total_bytes < plain.total_bytes
    assert {b.dtype for plan in (by_setting, by_option) for b in plan.buffers if b.name == "states"} == {"bfloat16"}
    assert {b.dtype for b in plain.buffers if b.name == "states"} == {"float32"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"ascend.dsv4": {"fia": True}},
            "ascend.dsv4 has no option 'fia', nor any other; give .* under 'ascend', .* 'dsv4'",
        ),
        (
            {"ascend": {"fai": True}},
            "ascend has no option 'fai'; did you mean 'fia'\\?; there are fia, align_transfers, ba",
        ),
        (
            {"dsv4": {"fp4": True}},
            "no setting 'fp4'; did you mean 'fp4_indexer'\\?; there are state_dtype, online_compress",
        ),
        ({"ascend.dsv": {}}, "names 'ascend.dsv', which is not loaded; did you mean 'ascend.dsv4'"),
    ],
)
def test_settings_that_nobody_takes_are_refused(planned, given, says):
    with pytest.raises(kvdock.KVDockError, match=says):
        planned(max_total_tokens=4096, plugin_options=given)


def test_one_request_is_one_request(planned):
    """U-06"""
    assert planned(max_running_requests=1).max_running_requests == 1


def test_a_plan_is_the_same_read_from_a_file(planned, dsv4_registry):
    made = planned(max_total_tokens=4096)
    again = kvdock.CachePlan.from_json(made.to_json(), registry=dsv4_registry())
    assert again.total_bytes == made.total_bytes


def test_states_begin_empty_and_read_as_they_were_written(cached):
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


def test_index_keys_have_a_scale_each(cached):
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
def test_requests_run_through_it_and_read_what_they_wrote(options, cached):
    from kvdock.testing.driver import drive
    from kvdock.testing.trace import Arrival

    arrivals = [Arrival(timestamp_ms=float(i), input_length=90 + 150 * i, output_length=60) for i in range(5)]
    report = drive(cached(**options), arrivals, seed=1)
    assert report.finished == 5
    assert report.checks
    assert not report.problems
    assert report.shared_tokens == 0


def test_drafts_keep_a_window_of_their_own(planned):
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
def test_every_part_writes_through_the_operators(npu_pool, name, planned):
    cache = kvdock.build(planned(max_total_tokens=4096), device="cpu", debug=False)
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


def test_calls_that_do_not_fit_are_refused(cached):
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


def test_parts_of_other_forms_do_not_fit_each_other(cached):
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
