"""Layers split over the ranks that share a context: shares, bytes, and reads of other ranks' layers."""

import json
import subprocess
import sys

import kvdock
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError, UnsupportedCombination
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.objections import objections
from kvdock.options import CacheOptions, Parallelism
from kvdock.queries import PlanQuery
from kvdock.startup import core_only

torch = pytest.importorskip("torch")

from kvdock.pools.layer_split import own_share  # noqa: E402

DEVICE = DeviceInfo(device_type="cpu", name="d", total_bytes=2**50, free_before_load_bytes=2**50, free_bytes=2**50)
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
ROW, KEY = 272, 132


def model_of(layers):
    return ModelSpec(name="m", architecture="M", layers=tuple(layers), context_length=256, dtype="bfloat16")


def plan_of(ranks, rank, layers=5, budget=2**22, **options):
    registry = core_only()
    given_options = {"page_size": 4, "layer_split": True, "role": "prefill", "max_running_requests": 4, **options}
    return kvdock.plan(
        model_of([DSA] * layers),
        device=DEVICE,
        options=given_options,
        parallel=Parallelism(tp_size=ranks, cp_size=ranks, cp_rank=rank),
        budget_bytes=budget,
        registry=registry,
    )


@pytest.fixture
def pool():
    """Rank 1 of 2, which stores layers 3 and 4 of 5; no other rank is there."""
    return kvdock.build(plan_of(2, 1, max_total_tokens=12), device="cpu").token_to_kv_pool


def test_the_first_ranks_store_a_layer_more():
    shares = [own_share(tuple(range(61)), 8, rank) for rank in range(8)]
    assert [len(share) for share in shares] == [8, 8, 8, 8, 8, 7, 7, 7]
    assert shares[0] == tuple(range(8))
    assert shares[7] == tuple(range(54, 61))


@given(layers=st.lists(st.integers(0, 99), unique=True, max_size=20), ranks=st.integers(1, 9))
def test_shares_are_all_layers_in_order(layers, ranks):
    ids = tuple(sorted(layers))
    shares = [own_share(ids, ranks, rank) for rank in range(ranks)]
    assert sum(shares, ()) == ids
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("rank", "own"), [(0, (0, 1)), (1, (2, 3)), (2, (4,))])
def test_a_rank_has_its_share_and_one_scratch_layer(rank, own):
    plan = plan_of(3, rank, budget=2**20)
    rows, keys, row_scratch, key_scratch = plan.groups[0].buffers
    assert rows.layers == keys.layers == own
    assert row_scratch.layers == key_scratch.layers == ()
    assert row_scratch.shape == rows.shape == (plan.spaces["full"] + 4, 1, 136)
    assert key_scratch.shape == keys.shape == (plan.spaces["full"] // 4 + 1, 4 * KEY)
    assert plan.bytes_per_token.kv == len(own) * (ROW + KEY)
    assert kvdock.build(plan, device="meta").allocated_bytes() == plan.total_bytes


def test_the_tokens_that_all_ranks_have_are_the_fewest_of_any():
    tokens = [plan_of(3, rank).max_total_num_tokens for rank in range(3)]
    assert tokens[0] == tokens[1] < tokens[2]
    assert plan_of(3, 2).replan(2**22, cap_tokens=min(tokens)).max_total_num_tokens == min(tokens)


def test_a_rank_without_a_layer_has_the_scratch_alone():
    plan = plan_of(3, 2, layers=2, max_total_tokens=64)
    assert [buffer.name for buffer in plan.groups[0].buffers] == ["kv_scratch", "index_k_scratch"]
    pool = kvdock.build(plan, device="cpu").token_to_kv_pool
    pool.set_index_k(0, torch.tensor([4]), torch.ones(1, 128))
    assert pool.get_cpu_copy(torch.tensor([4])) == []
    assert pool.buffer_infos() == []


def test_only_the_owner_stores_what_all_ranks_write(pool, slots):
    row, key = torch.ones(1, 1, 136), torch.ones(1, 128)
    for layer in range(5):
        pool.set_kv_buffer(layer, slots(5), row * layer, k_scale=None)
        pool.set_index_k(layer, slots(5), key * layer)
    for layer in (3, 4):
        assert pool.get_key_buffer(layer)[1, 1].eq(layer).all()
        assert pool.read_index_k(layer, slots(5)).eq(layer).all()
    assert not any(pool.parts.tensors.rows(name).any() for name in ("kv_scratch", "index_k_scratch"))


def test_what_does_not_fit_is_refused_on_every_rank(pool, slots):
    for layer in (0, 4):
        with pytest.raises(SlotError, match=f"layer {layer}: values of shape"):
            pool.set_kv_buffer(layer, slots(5), torch.ones(1, 1, 135))
        with pytest.raises(SlotError, match=f"layer {layer}: index keys of shape"):
            pool.set_index_k(layer, slots(5), torch.ones(1, 127))
    with pytest.raises(SlotError, match="layer 5 has no KV"):
        pool.set_index_k(5, slots(5), torch.ones(1, 128))
    with pytest.raises(SlotError, match="layer 5 has no KV"):
        pool.owner_rank(5)


def test_moves_copies_and_transfers_are_of_a_ranks_own_layers(pool, slots):
    pool.set_index_k(3, slots(5), torch.ones(1, 128))
    pool.move_kv_cache(slots(6), slots(5))
    assert pool.read_index_k(3, slots(6)).eq(1).all()
    assert len(pool.get_cpu_copy(slots(5))) == 2 + 2 * 2
    found = [(info.name, info.layer_id) for info in pool.buffer_infos()]
    assert found == [("kv", 3), ("kv", 4), ("index_k", 3), ("index_k", 4)]
    assert pool.layer_ids == (0, 1, 2, 3, 4)


def test_another_ranks_layer_needs_the_process_group(pool, slots):
    assert [pool.owner_rank(layer) for layer in range(5)] == [0, 0, 0, 1, 1]
    for read in (pool.get_key_buffer, pool.get_kv_buffer, pool.get_index_k_with_scale_buffer):
        with pytest.raises(
            SlotError, match=r"layer 1 is stored by rank 0 .* this is rank 1; give build\(\) the process"
        ):
            read(1)
    with pytest.raises(SlotError, match="layer 1 is stored by rank 0"):
        pool.read_index_k(1, slots(5))


def test_a_layer_split_says_all_that_is_against_it():
    options = CacheOptions(layer_split=True, role="decode", speculative_algorithm="EAGLE")
    query = PlanQuery(
        model=model_of([DSA]), options=options, parallel=Parallelism(), device=DEVICE, groups=(), spaces={}
    )
    ranks, role, drafts = objections(query)
    assert "give cp_size of 2 or more" in ranks
    assert "not for role=decode; give role=prefill" in role
    assert "speculative_algorithm=EAGLE" in drafts
    with pytest.raises(UnsupportedCombination) as error:
        plan_of(1, 0, role="none")
    assert [plugin for plugin, _ in error.value.objections] == ["core", "core"]


def test_other_kinds_of_layers_are_not_split():
    registry = core_only()
    layer = LayerSpec(kind="mla", params=kvdock.MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))
    with pytest.raises(UnsupportedCombination, match="MLAPool lacks layer_split"):
        kvdock.plan(
            model_of([layer]), device=DEVICE, options={"layer_split": True}, budget_bytes=2**20, registry=registry
        )


RANK = """
import json, sys
import torch
from torch import distributed
import kvdock
from kvdock.model import DSAParams

meet, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=3)
layer = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
model = kvdock.ModelSpec(name="m", architecture="M", layers=(layer,) * 5, context_length=64, dtype="bfloat16")

def plan_of(ranks, own, dtype):
    options = {"plugins": (), "page_size": 4, "layer_split": True, "role": "prefill", "max_total_tokens": 16,
               "max_running_requests": 2, "kv_cache_dtype": dtype}
    parallel = kvdock.Parallelism(tp_size=ranks, cp_size=ranks, cp_rank=own)
    return kvdock.plan(model, budget_bytes=2**22, options=options, parallel=parallel)

def read_all(pool, own):
    loc, found = torch.tensor([5, 18]), []
    for turn in (0, 1):
        for layer in range(5):
            # Each rank writes numbers of its own, so that what is read tells whose they are.
            number = float(64 * turn + 8 * layer + own + 1)
            pool.set_mla_kv_buffer(layer, loc, torch.full((2, 1, 128), number), torch.full((2, 1, 8), number))
            pool.set_index_k(layer, loc, torch.full((2, 128), number))
        for layer in range(5):
            latent, rope = pool.get_mla_kv_buffer(layer, loc, torch.float32)
            index, scale = pool.read_index_k(layer, loc), pool.get_index_k_scale(layer, loc) * 448
            rows, latents = pool.get_kv_buffer(layer)
            keys = pool.get_index_k_with_scale_buffer(layer).eq(0x7E).sum()
            found.append([*(round(float(t.float().mean()), 3) for t in (latent, rope, index, scale)),
                          int(keys) // 256, list(rows.shape), list(latents.shape)])
    return found

def refusal(plan, group):
    try:
        kvdock.build(plan, group=group)
    except kvdock.BuildError as error:
        return str(error)

for first, dtype in ((0, "bfloat16"), (1, "fp8_e4m3")):
    members = list(range(first, 3))
    group = distributed.new_group(members)
    if rank in members:
        own, ranks = members.index(rank), len(members)
        pool = kvdock.build(plan_of(ranks, own, dtype), device="cpu", group=group).token_to_kv_pool
        turned = plan_of(ranks, (own + 1) % ranks, dtype)
        print(json.dumps([read_all(pool, own), refusal(turned, group)]))
distributed.barrier()
distributed.destroy_process_group()
"""


def expected_reads(owners, width):
    shapes = [[5, 4, 1, width], [5, 4, 1, 128]]
    numbers = [64 * turn + 8 * layer + owner + 1 for turn in (0, 1) for layer, owner in enumerate(owners)]
    return [[number] * 4 + [1] + shapes for number in numbers]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_every_rank_reads_what_the_owner_wrote(tmp_path):
    commands = [[sys.executable, "-c", RANK, str(tmp_path / "meet"), str(rank)] for rank in range(3)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    lines = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    found = [[json.loads(line) for line in each] for each in lines]
    # first three ranks with rows of 16 bits, then the last two processes alone with scaled rows
    assert [len(each) for each in found] == [1, 2, 2]
    for rank in range(3):
        read, refused = found[rank][0]
        assert read == expected_reads([0, 0, 1, 1, 2], 136)
        assert f"the plan is for rank {(rank + 1) % 3} of 3 that share a context" in refused
    for own, rank in enumerate((1, 2)):
        read, refused = found[rank][1]
        assert read == expected_reads([0, 0, 0, 1, 1], 148)
        assert f"but this process is rank {own} of 2 in the group" in refused
