"""Does it fit, and what would: answers with numbers computed by hand, and every suggestion used again."""

import json
from pathlib import Path

import kvdock
import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.remedies import again, obstacles
from kvdock.startup import core_only

GIB, MIB = 2**30, 2**20
MODELS = Path(__file__).parents[1] / "models"
IDLE = DeviceInfo(device_type="cpu", name="idle", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
SMALL = DeviceInfo(device_type="cpu", name="small", total_bytes=GIB, free_before_load_bytes=GIB, free_bytes=GIB)
BYTES_PER_TOKEN = 4 * 2 * 64 * 2 * 2
"""Keys and values of 4 layers, 2 heads of 64, 2 bytes each: 2,048."""


def mha(heads=2, dim=64, **fields):
    return LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=dim), **fields)


def model(layers=None, context=1000):
    layers = tuple(layers or [mha()] * 4)
    return ModelSpec(name="invented", architecture="Invented", layers=layers, context_length=context, dtype="bfloat16")


def plan(layers=None, *, budget=4 * MIB, context=1000, device=IDLE, parallel=None, **options):
    return kvdock.plan(
        model(layers, context),
        device=device,
        options={"page_size": 16, "max_running_requests": 4, **options},
        parallel=parallel,
        budget_bytes=budget,
        registry=core_only(),
    )


def needs(answer):
    return {need.name: (need.needed, need.there, need.lacking) for need in answer.spaces}


def used_again(made, answer, remedy):
    """Return whether what a remedy suggests serves when it is used, planned from the beginning."""
    change = dict(remedy.change)
    requests, length = change.pop("requests", answer.requests), change.pop("length", answer.length)
    assert (remedy.requests, remedy.length) == (requests, length)
    budget, weights = change.pop("budget_bytes", None), change.pop("weights_bytes", made.budget.weights_bytes)
    given = msgspec.structs.asdict(made.outline.given)
    parallel = msgspec.structs.asdict(made.parallel)
    sizes = {name: change.pop(name) for name in list(change) if name in parallel}
    is_given = made.budget.base == "given" or budget is not None
    device = made.device
    if budget is not None:
        given["mem_fraction_static"] = None
        device = IDLE
    once_more = kvdock.plan(
        made.model,
        device=device,
        options={**given, **change},
        parallel={**parallel, **sizes},
        budget_bytes=(budget or made.budget_bytes) if is_given else None,
        weights_bytes=None if is_given else weights,
        registry=core_only(),
    )
    return kvdock.serves(once_more, requests, length).fits


def test_requests_that_fit_are_told_with_the_slots_that_they_hold():
    made = plan()
    answer = kvdock.serves(made, 4, 200)
    # 200 tokens lie on 13 pages of 16.
    assert needs(answer) == {"requests": (4, 4, 0), "full": (4 * 208, made.spaces["full"], 0)}
    assert answer.fits
    assert answer.kv_bytes == 4 * 208 * BYTES_PER_TOKEN
    assert (answer.reasons, answer.remedies) == ((), ())
    assert (answer.most_requests, answer.longest) == (4, made.max_length(4))


def test_requests_that_do_not_fit_are_told_what_lacks():
    made = plan(budget=2 * MIB)
    there = made.spaces["full"]
    answer = kvdock.serves(made, 4, 250)
    assert not answer.fits
    assert needs(answer)["full"] == (1024, there, 1024 - there)
    assert answer.reasons == (f"space full: 1,024 slots are needed, {there} are there, {1024 - there} are lacking",)


def test_the_smallest_budget_serves_and_a_byte_less_does_not():
    made = plan(budget=2 * MIB)
    answer = kvdock.serves(made, 4, 250)
    costs = made.costs
    # Padding and tables, 1,024 slots and 4 rows, of what each costs.
    slots = costs.per_slot["full"].kv + costs.per_slot["full"].bookkeeping
    rows = costs.per_slot["requests"].kv + costs.per_slot["requests"].bookkeeping
    assert answer.budget_bytes == costs.fixed_bytes + 1024 * slots + 4 * rows
    assert kvdock.serves(made.replan(answer.budget_bytes), 4, 250).fits
    assert not kvdock.serves(made.replan(answer.budget_bytes - 1), 4, 250).fits


def test_a_plan_that_serves_is_told_with_how_little_it_would():
    made = plan(budget=64 * MIB)
    answer = kvdock.serves(made, 4, 250)
    assert answer.fits
    assert answer.budget_bytes < 4 * MIB
    assert kvdock.serves(made.replan(answer.budget_bytes), 4, 250).fits


PLANS = {
    "a budget": (lambda: plan(budget=2 * MIB), 4, 900),
    "more than the limit": (lambda: plan(), 9, 100),
    "both": (lambda: plan(budget=2 * MIB), 40, 900),
    "tokens that were fixed": (lambda: plan(max_total_tokens=512), 4, 400),
    "a context that was fixed": (lambda: plan(context_length=300), 1, 800),
    "an automatic limit": (lambda: plan(budget=2 * MIB, max_running_requests=None), 300, 30),
    "windows": (lambda: plan([mha(window_tokens=63), mha()] * 2, budget=2 * MIB), 4, 900),
    "no window": (lambda: plan([mha(window_tokens=63), mha()] * 2, budget=2 * MIB, hybrid_swa="off"), 4, 900),
    "a share of a device": (
        lambda: kvdock.plan(
            model([mha(8, 128)] * 8, 20_000),
            device=SMALL,
            options={"page_size": 16, "mem_fraction_static": 0.5, "max_running_requests": 8},
            weights_bytes=256 * MIB,
            registry=core_only(),
        ),
        2,
        8000,
    ),
    "more than the device": (
        lambda: kvdock.plan(
            model([mha(8, 128)] * 8, 20_000),
            device=SMALL,
            options={"page_size": 16, "max_running_requests": 8},
            weights_bytes=512 * MIB,
            registry=core_only(),
        ),
        8,
        16_000,
    ),
}


@pytest.mark.parametrize(("make", "requests", "length"), PLANS.values(), ids=list(PLANS))
def test_every_suggestion_serves_when_it_is_used(make, requests, length):
    made = make()
    answer = kvdock.serves(made, requests, length)
    assert not answer.fits
    assert answer.remedies
    for remedy in answer.remedies:
        assert used_again(made, answer, remedy), remedy


def changes(answer):
    return [remedy.change for remedy in answer.remedies]


def test_memory_a_narrower_type_and_more_ranks_are_suggested():
    answer = kvdock.serves(plan(budget=2 * MIB), 4, 400)
    told = changes(answer)
    assert told[0] == {"budget_bytes": answer.budget_bytes}
    assert {"kv_cache_dtype": "float8_e4m3fn"} in told
    assert {"tp_size": 2} in told
    assert {"requests": answer.most_requests} in told
    assert {"length": answer.longest} in told


def test_the_fewest_requests_and_the_longest_length_are_on_the_boundary():
    made = plan(budget=2 * MIB)
    answer = kvdock.serves(made, 4, 400)
    assert not obstacles(made, answer.most_requests, 400)
    assert obstacles(made, answer.most_requests + 1, 400)
    assert not obstacles(made, 4, answer.longest)
    assert obstacles(made, 4, answer.longest + 1)


def test_a_limit_of_the_users_is_raised_before_memory_is_asked_for():
    answer = kvdock.serves(plan(), 9, 100)
    assert answer.reasons == ("space requests: 9 slots are needed, 4 are there, 5 are lacking",)
    assert changes(answer) == [{"max_running_requests": 9}, {"requests": 4}]


def test_a_limit_and_memory_are_raised_together():
    answer = kvdock.serves(plan(budget=2 * MIB), 40, 900)
    assert answer.budget_change == {"max_running_requests": 40}
    assert changes(answer)[0] == {"budget_bytes": answer.budget_bytes, "max_running_requests": 40}


def test_tokens_and_a_context_that_were_fixed_are_raised():
    assert changes(kvdock.serves(plan(max_total_tokens=512), 4, 400))[0] == {"max_total_tokens": 1600}
    assert changes(kvdock.serves(plan(context_length=300), 1, 800))[0] == {"context_length": 800}


def test_nothing_but_a_shorter_length_gets_round_the_models_context():
    answer = kvdock.serves(plan(), 1, 1001)
    assert answer.reasons == ("length=1,001 is more than context_length=1,000",)
    assert (answer.budget_bytes, answer.most_requests) == (None, 0)
    assert changes(answer) == [{"length": 1000}]


def test_a_longer_context_that_is_allowed_is_asked_for():
    answer = kvdock.serves(plan(allow_longer_context=True), 1, 1500)
    assert changes(answer)[0] == {"context_length": 1500}


def test_the_smallest_fraction_serves_and_a_thousandth_less_does_not():
    make, requests, length = PLANS["a share of a device"]
    made = make()
    answer = kvdock.serves(made, requests, length)
    fraction = changes(answer)[0]["mem_fraction_static"]
    assert not obstacles(again(made, {"mem_fraction_static": fraction}), requests, length)
    assert obstacles(again(made, {"mem_fraction_static": round(fraction - 0.001, 3)}), requests, length)


def test_a_budget_above_the_device_is_said_to_be_one_and_not_offered():
    make, requests, length = PLANS["more than the device"]
    answer = kvdock.serves(make(), requests, length)
    assert not any(change.keys() & {"mem_fraction_static", "budget_bytes"} for change in changes(answer))
    assert answer.budget_bytes > 512 * MIB
    assert answer.budget_note == (
        "more memory than small has, where 512.00 MiB (536,870,912 bytes) are free beside weights and reserve"
    )


def test_a_budget_that_a_device_has_is_offered_beside_a_share_of_it():
    make, requests, length = PLANS["a share of a device"]
    answer = kvdock.serves(make(), requests, length)
    (budget,) = (remedy for remedy in answer.remedies if "budget_bytes" in remedy.change)
    assert (answer.budget_note, budget.note) == ("", "given outright, not as a share of small")


@pytest.mark.parametrize("spare", [0, -1])
def test_a_budget_that_is_given_on_a_device_is_raised_up_to_what_is_free_there(spare):
    least = kvdock.serves(plan(budget=2 * MIB), 4, 900).budget_bytes
    free = least + spare
    device = msgspec.structs.replace(SMALL, free_before_load_bytes=free, free_bytes=free)
    answer = kvdock.serves(plan(budget=2 * MIB, device=device), 4, 900)
    assert answer.budget_bytes == least
    offered = [change for change in changes(answer) if "budget_bytes" in change]
    if spare < 0:
        assert offered == []
        assert answer.budget_note.startswith("more memory than small has, where 7.")
        assert answer.budget_note.endswith(f"({free:,} bytes) are free")
    else:
        assert (offered, answer.budget_note) == ([{"budget_bytes": least}], "")
        assert kvdock.serves(plan(budget=least, device=device), 4, 900).fits


def test_a_budget_without_a_device_may_be_any():
    made = kvdock.plan(model(), budget_bytes=MIB, options={"page_size": 16}, registry=core_only())
    answer = kvdock.serves(made, 4, 900)
    assert answer.budget_note == ""
    assert {"budget_bytes": answer.budget_bytes} in changes(answer)


def test_more_ranks_share_the_weights():
    make, requests, length = PLANS["more than the device"]
    answer = kvdock.serves(make(), requests, length)
    (more,) = (remedy for remedy in answer.remedies if "tp_size" in remedy.change)
    assert more.change["weights_bytes"] == 512 * MIB // more.change["tp_size"]
    assert more.note == "the weights of a rank scaled by the ratio"


def test_requests_are_shared_out_over_the_workers():
    made = plan(parallel={"tp_size": 4, "dp_size": 4, "dp_attention": True}, max_running_requests=16)
    assert made.max_running_requests == 4
    answer = kvdock.serves(made, 10, 100)
    assert (answer.workers, answer.requests_per_worker) == (4, 3)
    assert needs(answer)["full"][0] == 3 * 112
    assert answer.most_requests == 16
    lacking = kvdock.serves(made, 17, 100)
    assert changes(lacking)[0] == {"max_running_requests": 20}  # 5 on each of 4


def test_ranks_that_share_the_tokens_hold_a_part_of_each_request():
    made = plan(parallel={"tp_size": 4, "dcp_size": 2})
    answer = kvdock.serves(made, 4, 200)
    # Half of 200 tokens lie on 7 pages of 16.
    assert needs(answer)["full"][0] == 4 * 112
    found = kvdock.longest(plan(budget=MIB, parallel={"tp_size": 4, "dcp_size": 2}), 4)
    assert found.bound == "full"
    assert found.length % 32 == 0


@pytest.mark.parametrize("page", [1, 16])
def test_the_longest_request_is_exact_and_named_with_what_stops_it(page):
    # T-04, T-06: the inverse of a cost that is not linear in the length
    made = plan([mha(window_tokens=63), mha()] * 2, budget=2 * MIB, page_size=page)
    found = kvdock.longest(made, 4)
    assert found.length % page == 0
    assert not obstacles(made, 4, found.length)
    assert obstacles(made, 4, found.length + 1)
    assert found.bound == "full"
    # 4 requests: whole in two layers, the window of 64 (and a page) in the other two.
    window = 64 if page == 1 else 80
    per_layer = BYTES_PER_TOKEN // 4
    assert found.kv_bytes == 4 * 2 * per_layer * (found.length + window)


def test_the_longest_request_ends_with_the_context():
    found = kvdock.longest(plan(budget=64 * MIB), 4)
    assert (found.length, found.bound, found.context_length) == (1000, "context_length", 1000)


def test_more_requests_than_rows_have_no_length_at_all():
    found = kvdock.longest(plan(budget=64 * MIB), 5)
    assert (found.length, found.bound) == (0, "requests")


def test_both_window_policies_are_told():
    # T-02: 12 full layers and 12 with a window of 128, 32 requests of 8192 tokens, 8 heads x 64
    layers = [mha(8, 64, window_tokens=127 if i % 2 else None) for i in range(24)]
    fields = {"budget": 40 * GIB, "context": 131_072, "page_size": 1, "max_running_requests": 32}
    whole = kvdock.serves(plan(layers, hybrid_swa="off", **fields), 32, 8192)
    capped = kvdock.serves(plan(layers, **fields), 32, 8192)
    assert whole.kv_bytes == 12 * GIB
    assert round(capped.kv_bytes / GIB, 2) == 6.09
    assert whole.windows == "every layer with KV keeps the whole request (hybrid_swa=off)"
    assert capped.windows == "layers with a window keep 127 earlier tokens in the space 'swa'"


def test_capacity_is_a_function_of_length_and_requests():
    # U-04: no cost a token gives these numbers
    made = plan([mha(window_tokens=63), mha()] * 2, budget=4 * MIB, page_size=1, max_running_requests=64)
    short, long = kvdock.serves(made, 1, 50), kvdock.serves(made, 1, 500)
    assert short.kv_bytes == 50 * BYTES_PER_TOKEN
    assert long.kv_bytes == (500 + 64) * BYTES_PER_TOKEN // 2
    for answer in (short, long):
        assert answer.most_requests == made.concurrency(answer.length)
        assert not obstacles(made, answer.most_requests, answer.length)


def test_states_that_limit_requests_are_named_with_the_slots_that_serve():
    # U-02: 32 requests, 47 state slots, 5 for each: 9 run
    made = kvdock.plan(
        MODELS / "qwen3-next-80b-a3b.json",
        budget_bytes=40 * GIB,
        options={"max_running_requests": 32, "max_state_slots": 47, "state_extra_buffer": "on"},
        registry=core_only(),
    )
    answer = kvdock.serves(made, 32, 1000)
    assert answer.most_requests == 9
    assert needs(answer)["requests"] == (32, 9, 23)
    assert needs(answer)["state"] == (160, 47, 113)
    assert changes(answer)[0] == {"max_running_requests": 32, "max_state_slots": 160}
    assert kvdock.serves(again(made, changes(answer)[0]), 32, 1000).fits


def test_hybrid_models_cost_a_block_of_attention_and_a_constant_for_states():
    # T-03: 64 layers, 16 of them full, 4 heads of 256 in 16 bits: 4 MiB for a block of 64 tokens
    config = json.loads((MODELS / "qwen3-next-80b-a3b.json").read_text())
    made = kvdock.plan(
        {**config, "num_hidden_layers": 64, "num_key_value_heads": 4, "head_dim": 256},
        budget_bytes=40 * GIB,
        options={"page_size": 64, "prefix_cache": False},
        registry=core_only(),
    )
    one, two, ten = (kvdock.serves(made, 1, blocks * 64).kv_bytes for blocks in (1, 2, 10))
    assert two - one == 4 * MIB
    assert ten - one == 9 * 4 * MIB
    state = one - 4 * MIB
    assert state == sum(cost.kv for name, cost in made.costs.per_slot.items() if name == "state")
    assert kvdock.serves(made, 3, 64).kv_bytes == 3 * (4 * MIB + state)


def test_a_context_above_the_capacity_is_answered_with_what_fits():
    # U-05: context 163,840 and room for fewer tokens
    made = plan([mha(8, 128)] * 32, budget=8 * GIB, context=163_840)
    answer = kvdock.serves(made, 1, 163_840)
    assert not answer.fits
    assert answer.longest == made.max_request_tokens < 163_840


def test_a_plan_that_ranks_agreed_on_is_asked_like_any():
    made = kvdock.plan_ranks(
        model(),
        device=IDLE,
        budget_bytes=[2 * MIB, 3 * MIB],
        options={"page_size": 16, "max_running_requests": 4},
        parallel={"tp_size": 2},
        registry=core_only(),
    )
    answer = kvdock.serves(made.plans[1], 4, 900)
    assert not answer.fits
    assert answer.budget_bytes == kvdock.serves(made.plans[0], 4, 900).budget_bytes


def test_no_memory_gets_round_a_cap_on_tokens():
    made = plan(budget=64 * MIB).replan(64 * MIB, cap_tokens=512)
    answer = kvdock.serves(made, 4, 400)
    assert answer.budget_bytes is None
    assert [set(change) for change in changes(answer)] == [{"requests"}, {"length"}]


@pytest.mark.parametrize(
    ("requests", "length", "reason"),
    [
        (0, 1, "requests=0 is no count; give a whole number from 1 to 2147483647"),
        (-3, 1, "requests=-3 is no count"),
        (True, 1, "requests=True is no count"),
        (1, 0, "length=0 is no count"),
        (1, 2.5, r"length=2\.5 is no count"),
        (1, "8k", "length='8k' is no count"),
        (1, 2**31, "length=2147483648 is no count"),
    ],
)
def test_numbers_that_are_no_counts_are_refused(requests, length, reason):
    with pytest.raises(PlanError, match=reason):
        kvdock.serves(plan(), requests, length)


def test_what_is_no_plan_is_refused():
    for ask in (lambda: kvdock.serves({}, 1, 1), lambda: kvdock.longest("plan")):
        with pytest.raises(PlanError, match=r"is no plan; give what kvdock\.plan returned"):
            ask()


def test_answers_are_data():
    answer = kvdock.serves(plan(budget=2 * MIB), 40, 900)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=type(answer)) == answer


LATENT = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=128, qk_rope_head_dim=64))


def latent_plan(**fields):
    """A plan of 4 layers of latents, of which each of 4 ranks holds a copy: 4 x 192 x 2 = 1,536 bytes a token."""
    return plan([LATENT] * 4, parallel={"tp_size": 4}, **fields)


def test_ranks_that_hold_copies_are_told_to_share_tokens_or_requests():
    # 4 requests of 900 tokens hold 912 slots each, 3,648 in all; 2 MiB hold 1,365 at most. Two ranks that share the
    # tokens hold 4 x 464 slots each, too many still, and so do two requests of 912; four ranks hold 4 x 240, or 912.
    made = latent_plan(budget=2 * MIB)
    answer = kvdock.serves(made, 4, 900)
    assert {"dcp_size": 4} in changes(answer)
    assert {"dp_size": 4, "dp_attention": True} in changes(answer)
    assert all(used_again(made, answer, remedy) for remedy in answer.remedies)
    assert not any(
        change.keys() & {"dcp_size", "dp_size"} for change in changes(kvdock.serves(plan(budget=MIB), 4, 900))
    )


def test_a_limit_on_requests_is_raised_for_all_workers_that_share_them():
    # 6 requests are 2 on each of 4 workers: max_running_requests counts all 8.
    made = latent_plan(budget=3 * MIB)
    (shared,) = (change for change in changes(kvdock.serves(made, 6, 900)) if "dp_size" in change)
    assert shared == {"dp_size": 4, "dp_attention": True, "max_running_requests": 8}


def test_workers_are_suggested_only_where_their_weights_are_known():
    def made(parallel, **fields):
        return kvdock.plan(
            model([LATENT] * 64, 20_000),
            device=SMALL,
            options={"page_size": 16, "max_running_requests": 8},
            parallel=parallel,
            registry=core_only(),
            **fields,
        )

    sharing = {"dp_size", "dcp_size"}
    known = changes(kvdock.serves(made({"tp_size": 4}), 8, 10_000))
    stated = changes(kvdock.serves(made({"tp_size": 4}, weights_bytes=MIB), 8, 10_000))
    assert [sorted(change.keys() & sharing) for change in known if change.keys() & sharing] == [
        ["dcp_size"],
        ["dp_size"],
    ]
    assert [sorted(change.keys() & sharing) for change in stated if change.keys() & sharing] == [["dcp_size"]]


@pytest.mark.parametrize(
    ("make", "requests", "limit", "first"),
    [
        (lambda: plan(budget=2 * MIB), 4, "tokens", "budget_bytes"),
        (lambda: plan(max_total_tokens=512), 4, "tokens", "max_total_tokens"),
        (lambda: plan(budget=64 * MIB), 5, "requests", "max_running_requests"),
        (lambda: plan(context_length=300), 1, "request_tokens", "context_length"),
    ],
)
def test_what_stops_the_longest_request_is_named_with_what_raises_it(make, requests, limit, first):
    made = make()
    found = kvdock.longest(made, requests)
    assert found.limit == limit
    assert set(found.remedies[0].change) == {first}
    for remedy in found.remedies:
        assert remedy.length > found.length
        assert used_again(made, msgspec.structs.replace(found, length=remedy.length), remedy), remedy


def test_the_models_own_context_is_not_raised():
    found = kvdock.longest(plan(budget=64 * MIB), 4)
    assert (found.limit, found.remedies) == ("request_tokens", ())


def test_a_context_is_raised_as_far_as_the_models_own_if_it_fits():
    found = kvdock.longest(plan(budget=64 * MIB, context_length=300), 4)
    assert found.remedies[0].change == {"context_length": 1000}
