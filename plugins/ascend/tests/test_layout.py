"""Pages that follow each other, all layers in one tensor: shapes and bytes worked out by hand."""

import kvdock
import msgspec
import pytest
from kvdock.builder import build
from kvdock_ascend import device
from kvdock_ascend.pools import NpuDSAPool, NpuMHAPool, NpuMLAPool

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

MIB = 2**20


def built(made, **options):
    return build(made, device="cpu", debug=False, **options)


def buffers_of(made, group=0):
    return {buffer.name: buffer for buffer in made.groups[group].buffers}


def test_keys_and_values_of_all_layers_are_a_tensor_each(plan):
    """3 layers of 2 heads × 128 in bfloat16: 1,536 bytes of keys a token; 1,024 tokens and a page of padding."""
    cache = built(plan("mha", max_total_tokens=1024, max_running_requests=4))
    pool = cache.token_to_kv_pool
    assert type(pool) is NpuMHAPool
    for name in ("k", "v"):
        whole = pool.all_layers(name)
        assert whole.shape == (3, 9, 128, 2, 128)
        assert whole.is_contiguous()
        assert whole.dtype is torch.bfloat16
    assert cache.plan.bytes_per_token.kv == 3 * 2 * 2 * 128 * 2
    # P-04
    assert len({raw.data_ptr() for raw in pool.storages()}) == 2
    # 1,152 rows of 1,536 bytes are 1,769,472: one segment of 2 MiB for keys, one for values.
    assert pool.mem_usage == 2 * 2 * MIB


def test_views_of_a_layer_share_the_tensor_of_all(plan):
    pool = built(plan("mha", max_total_tokens=1024)).token_to_kv_pool
    whole = pool.all_layers("v")
    for place in range(3):
        view = pool.get_value_buffer(place)
        assert view.data_ptr() == whole[place].data_ptr()
        assert view.shape == (9, 128, 2, 128)
        assert view.is_contiguous()


@pytest.mark.parametrize(
    "options", [{"attention_backend": "ascend_fia"}, {"plugin_options": {"ascend": {"fia": True}}}]
)
def test_fused_inference_attention_reads_slot_by_slot(plan, options):
    pool = built(plan("mha", max_total_tokens=1024, **options)).token_to_kv_pool
    keys = pool.get_key_buffer(1)
    assert keys.shape == (1152, 1, 2, 128)
    assert keys.data_ptr() == pool.all_layers("k")[1].data_ptr()
    loc, rows = torch.tensor([300]), torch.randn(1, 2, 128).bfloat16()
    pool.set_kv_buffer(1, loc, rows, -rows)
    assert torch.equal(keys[300, 0], rows[0])
    assert torch.equal(pool.read_kv(1, loc)[1], -rows)


def test_latents_and_rope_parts_are_apart(plan):
    """2 layers of 512 + 64 columns in bfloat16: 2,304 bytes a token, as the kind needs wherever it lies (P-14)."""
    made = plan("mla", max_total_tokens=1024)
    pool = built(made).token_to_kv_pool
    assert type(pool) is NpuMLAPool
    assert pool.all_layers("k").shape == (2, 9, 128, 1, 512)
    assert pool.all_layers("v").shape == (2, 9, 128, 1, 64)
    assert made.bytes_per_token.kv == 2 * 576 * 2
    assert [buffer.role for buffer in made.groups[0].buffers] == ["latent", "rope"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_index_keys_are_of_the_pools_type_and_have_no_scales(plan, dtype):
    """2 layers of 512 + 64 + 128 columns: 2,816 bytes a token."""
    made = plan("dsa", max_total_tokens=1024, kv_cache_dtype=dtype)
    pool = built(made).token_to_kv_pool
    assert type(pool) is NpuDSAPool
    assert pool.all_layers("index_k").shape == (2, 9, 128, 1, 128)
    assert pool.all_layers("index_k").dtype is getattr(torch, dtype)
    assert made.bytes_per_token.kv == 2 * 704 * 2
    with pytest.raises(kvdock.SlotError, match="index keys have no scales on npu; read get_index_k_buffer"):
        pool.get_index_k_with_scale_buffer(0)


def test_index_keys_read_as_they_were_written(plan):
    pool = built(plan("dsa", max_total_tokens=1024)).token_to_kv_pool
    loc, keys = torch.tensor([128, 700]), torch.randn(2, 128).bfloat16()
    pool.set_index_k(1, loc, keys)
    assert torch.equal(pool.read_index_k(1, loc), keys.float())
    assert torch.equal(pool.get_index_k_buffer(1)[5, 60, 0], keys[1])
    with pytest.raises(kvdock.SlotError, match="values of shape"):
        pool.set_index_k(1, loc, keys[:, :64])
    with pytest.raises(kvdock.SlotError, match="layer 9"):
        pool.set_index_k(9, loc, keys)


def test_whole_rows_are_split_where_they_are_written(plan):
    pool = built(plan("mla", max_total_tokens=1024)).token_to_kv_pool
    loc, row = torch.tensor([200]), torch.randn(1, 1, 576).bfloat16()
    pool.set_kv_buffer(0, loc, row)
    latent, rope = pool.get_mla_kv_buffer(0, loc)
    assert torch.equal(latent, row[..., :512])
    assert torch.equal(rope, row[..., 512:])
    with pytest.raises(kvdock.SlotError, match="values of shape"):
        pool.set_kv_buffer(0, loc, row[..., :512])


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa", "sliding", "pure", "linear"])
@pytest.mark.parametrize("align", [False, True])
def test_planned_bytes_are_unique_storages(plan, kind, align):
    """P-04: what lies in one tensor is counted once, whatever the number of views."""
    options = {"plugin_options": {"ascend": {"align_transfers": True}}} if align else {}
    cache = built(plan(kind, max_total_tokens=2048, max_running_requests=2, context_length=512, **options))
    raws = {raw.data_ptr(): raw.numel() for pool in cache.pools.values() for raw in pool.storages()}
    planned = sum(buffer.nbytes for group in cache.plan.groups for buffer in group.buffers)
    assert sum(raws.values()) == planned
    assert len(raws) == sum(len(group.buffers) for group in cache.plan.groups)
    assert cache.allocated_bytes() == cache.plan.total_bytes


def test_aligned_buffers_begin_on_2_mib_and_take_at_most_2_mib_more(plan):
    """P-05: 61 layers, keys and values; the room is in the plan, and off there is none."""
    layers = kvdock.ModelSpec(
        name="m",
        architecture="A",
        layers=(kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=1, head_dim=64, v_head_dim=64)),)
        * 61,
        context_length=4096,
        dtype="bfloat16",
    )
    fine = msgspec.structs.replace(device.catalogue()["910b-64gb"], granularity_bytes=1)
    plain = plan(layers, device=fine, max_total_tokens=1024, max_running_requests=2)
    aligned = plan(
        layers,
        device=fine,
        max_total_tokens=1024,
        max_running_requests=2,
        plugin_options={"ascend": {"align_transfers": True}},
    )
    # 61 layers × 1,152 rows × 64 columns × 2 bytes
    assert [buffer.nbytes for buffer in plain.groups[0].buffers] == [8_994_816] * 2
    assert [buffer.nbytes for buffer in aligned.groups[0].buffers] == [8_994_816 + 2 * MIB] * 2
    pool = built(aligned).token_to_kv_pool
    found = pool.transfer_buffers()
    assert [region.pointer % (2 * MIB) for region in found] == [0, 0]
    assert [region.nbytes for region in found] == [8_994_816] * 2
    assert [region.item_nbytes for region in found] == [128 * 128] * 2
    for info in pool.buffer_infos():
        inside = found[0 if info.name == "k" else 1]
        assert inside.pointer <= info.pointer <= info.pointer + info.nbytes <= inside.pointer + inside.nbytes


def test_descriptors_carry_the_global_layer_and_the_role(plan):
    """G-06, G-07: buffer by buffer, layer by layer, and all that a page owns."""
    pool = built(plan("dsa", max_total_tokens=1024)).token_to_kv_pool
    found = [(info.role, info.layer_id, info.item_nbytes) for info in pool.buffer_infos()]
    assert found == [
        ("latent", 0, 128 * 1024),
        ("latent", 1, 128 * 1024),
        ("rope", 0, 128 * 128),
        ("rope", 1, 128 * 128),
        ("index", 0, 128 * 256),
        ("index", 1, 128 * 256),
    ]


def test_a_stage_of_a_pipeline_keeps_the_global_ids_of_its_layers(plan):
    """G-06: the second stage of 3 layers over 2 holds the last two."""
    cache = built(plan("mha", max_total_tokens=1024, parallel={"pp_size": 2, "pp_rank": 1}))
    assert [info.layer_id for info in cache.token_to_kv_pool.buffer_infos()] == [1, 2, 1, 2]


def test_full_and_sliding_layers_have_pools_of_this_plugin(plan):
    cache = built(plan("sliding", max_total_tokens=4096, max_running_requests=2))
    assert {type(pool) for pool in cache.pools.values()} == {NpuMHAPool}
    full, swa = cache.plan.spaces["full"], cache.plan.spaces["swa"]
    assert cache.pools["full"].all_layers("k").shape == (1, full // 128 + 1, 128, 2, 128)
    assert cache.pools["swa"].all_layers("k").shape == (2, swa // 128 + 1, 128, 2, 128)


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa"])
def test_ranks_that_share_tokens_keep_their_own_rows_and_all_index_keys(plan, kind):
    """2 ranks: a rank has 1,024 rows of the 2,048 tokens, and of index keys all."""
    made = plan(kind, max_total_tokens=1024, parallel={"tp_size": 4, "dcp_size": 2, "dcp_rank": 1})
    assert made.max_total_num_tokens == 2048
    pool = built(made).token_to_kv_pool
    heads = (1, 128) if kind == "mha" else (1, 512)
    assert pool.all_layers("k").shape[1:] == (9, 128, *heads)
    loc = torch.tensor([256 + 3, 256 + 4])
    shapes = [view.shape[2:] for view in pool.get_kv_buffer(0)]
    k, v = (torch.randn(2, *shape).bfloat16() for shape in shapes)
    pool.set_kv_buffer(0, loc, k, v)
    _, own = pool.own_rows(loc)
    assert own.tolist() == [True, False]
    assert torch.equal(pool.read_kv(0, loc)[0][0], k[0])
    if kind == "dsa":
        assert pool.all_layers("index_k").shape[1:] == (18, 128, 1, 128)
        keys = torch.randn(2, 128).bfloat16()
        pool.set_index_k(0, loc, keys)
        pool.move_kv_cache(loc + 512, loc)
        assert torch.equal(pool.read_index_k(0, loc + 512), keys.float())
        assert torch.equal(pool.read_kv(0, loc + 512)[0][0], k[0])
