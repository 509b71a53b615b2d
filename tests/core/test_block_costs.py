"""What block formats cost, in bytes worked out by hand, and buffers that lie over each other."""

import pytest
from kvdock.costs import bytes_per_token, find_costs
from kvdock.device import DeviceInfo
from kvdock.layout import Buffer, SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.sizing import Problem, total_nbytes
from kvdock.startup import core_only

ROOM = 40 * 2**30
DEVICE = DeviceInfo(device_type="cpu", name="cpu", total_bytes=ROOM, free_before_load_bytes=ROOM, free_bytes=ROOM)
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128))
LATENT = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))


def make_plan(layers, dtype, page_size=64):
    registry = core_only()
    model = ModelSpec(name="m", architecture="M", layers=tuple(layers), context_length=4096, dtype="bfloat16")
    given = make_options({"max_running_requests": 4, "kv_cache_dtype": dtype, "page_size": page_size})
    return plan_from((model,), DEVICE, given, Parallelism(), registry, budget_bytes=ROOM)


@pytest.mark.parametrize(
    ("layers", "dtype", "kv", "workspace"),
    [
        # 32 layers · 2 sides · 8 heads · (64 + 8), (64 + 8), (128 + 4) bytes; 61 latents of 288 + 36.
        ([HEADS] * 32, "fp4_mx_block16", 36864, 0),
        ([HEADS] * 32, "nvfp4", 36864, 2048),
        ([HEADS] * 32, "mxfp8", 67584, 0),
        ([LATENT] * 61, "fp4_mx_block16", 19764, 0),
    ],
)
def test_bytes_per_token_are_data_scales_and_one_workspace(layers, dtype, kv, workspace):
    plan = make_plan(layers, dtype)
    plain = make_plan(layers, "bfloat16")
    assert plan.bytes_per_token.kv == kv
    assert plan.bytes_per_token.bookkeeping - plain.bytes_per_token.bookkeeping == workspace
    assert plan.bytes_for(64) == 64 * kv


def test_factors_are_8_bytes_a_layer_once():
    plan = make_plan([HEADS] * 32, "nvfp4")
    (factors,) = [buffer for buffer in plan.buffers if buffer.name == "global_scale"]
    assert (factors.shape, factors.nbytes) == ((32, 1, 2), 256)


def space(name, ratio=(1, 1), page_size=4):
    return Space(name=name, rule=SizeRule(per_token=ratio), page_size=page_size)


def over(name, owner, where, width, guard=4):
    return Buffer(
        name=name, role="workspace", space=where, shape=(width,), dtype="uint8", guard=guard, overlay="w", owner=owner
    )


@pytest.mark.parametrize(
    ("full_width", "swa_width", "per_token", "per_slot"),
    [
        (100, 150, 100, {"full": 100, "swa": 0}),  # 150 a sliding slot are 75 a token
        (100, 250, 125, {"full": 0, "swa": 250}),
        (100, 200, 100, {"full": 100, "swa": 0}),  # the first of equals
    ],
)
def test_of_what_lies_over_each_other_the_fastest_growing_is_charged(full_width, swa_width, per_token, per_slot):
    problem = Problem(
        spaces={"full": space("full"), "swa": space("swa", (1, 2))},
        buffers=(
            Buffer(name="k", role="key", space="full", shape=(10,), dtype="uint8", guard=4, owner="a", is_kv=True),
            over("w", "a", "full", full_width),
            over("w", "b", "swa", swa_width),
        ),
        page_size=4,
    )
    cost = bytes_per_token(problem)
    assert (cost.kv, cost.bookkeeping) == (10, per_token)
    costs = find_costs(problem)
    assert {name: found.bookkeeping for name, found in costs.per_slot.items()} == per_slot
    if full_width * 2 == swa_width:
        return  # of equals the one with more padding is larger by that
    sizes = {"full": 4000, "swa": 2000}
    slots = sum(sizes[name] * (found.kv + found.bookkeeping) for name, found in costs.per_slot.items())
    assert costs.fixed_bytes + slots == total_nbytes(problem, sizes)
