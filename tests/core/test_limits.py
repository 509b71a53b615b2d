"""Limits as data, the host budget, and the tokens of caches that keep no KV."""

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.layout import Buffer, SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.sizing import Problem, Solver, host_nbytes
from kvdock.startup import core_only

GIB, MIB = 2**30, 2**20
SKIPS = DeviceInfo(
    device_type="cpu",
    name="idle",
    total_bytes=2**40,
    free_before_load_bytes=2**40,
    free_bytes=2**40,
    capabilities=frozenset({"skip_kv_cache:fa3"}),
)


def mha(heads=8, dim=128, **fields):
    return LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=dim), **fields)


def state(rows, columns):
    """A layer with a temporal state of so many float32 values a slot."""
    return LayerSpec(kind="state", params=StateParams(conv=(), temporal=(1, rows, columns)))


def plan(layers, *, budget=GIB, options=None, context=131_072, parallel=None):
    model = ModelSpec(
        name="invented", architecture="Invented", layers=tuple(layers), context_length=context, dtype="bfloat16"
    )
    return kvdock.plan(
        model, device=SKIPS, options=options, parallel=parallel, budget_bytes=budget, registry=core_only()
    )


def limit(made, name):
    (found,) = (limit for limit in made.limits if limit.name == name)
    return found


def test_a_request_limit_below_what_was_asked_names_what_binds_and_what_raises_it():
    # U-02: 32 requests, 47 state slots, 5 a request
    options = {"max_running_requests": 32, "max_state_slots": 47, "state_extra_buffer": "on"}
    made = plan([mha(), state(32, 48)], options=options)
    found = limit(made, "requests")
    assert (found.requested, found.effective, made.max_running_requests) == (32, 9, 9)
    assert (found.factor, found.raised_by) == ("state slots // 5", ("max_state_slots",))
    assert limit(made, "state_slots").effective == 47


def test_explicit_limits_win_over_the_ratio():
    # H-02: 20 GiB, 50 MiB a state slot, three a request, 32 KiB a token, 16 requests
    layers = [*[mha(4, 128)] * 16, *[state(640, 640)] * 32]
    slot = 50 * MIB
    made = plan(layers, budget=20 * GIB, options={"max_running_requests": 16, "page_size": 64}, context=4096)
    assert made.spaces["state"] == 48
    assert made.bytes_per_token.kv == 32_768
    table = sum(buffer.nbytes for buffer in made.tables)
    padding = 64 * 32_768 + slot
    # 578,560 tokens without padding and tables: what those take is less than their pages, no more
    assert made.spaces["full"] == (20 * GIB - 48 * slot - padding - table) // 32_768 // 64 * 64
    assert 578_560 - made.spaces["full"] <= (padding + table) // 32_768 + 64
    by_ratio = plan(layers, budget=20 * GIB, options={"state_sizing": "ratio", "page_size": 64}, context=4096)
    assert by_ratio.spaces["state"] == 20 * GIB * 9 // 19 // slot - 1 == 193  # one of the 194 rows is padding


def test_states_that_were_asked_for_and_do_not_fit_are_named_with_what_would():
    # H-02: the explicit pair does not fit
    layers = [mha(), state(1024, 1536)]
    with pytest.raises(
        kvdock.BudgetError, match=r"max_running_requests=1000 .*max_running_requests=(\d+) fits"
    ) as told:
        plan(layers, budget=GIB, options={"max_running_requests": 1000}, context=1024)
    fits = int(str(told.value).split("max_running_requests=")[-1].split()[0])
    assert plan(layers, budget=GIB, options={"max_running_requests": fits}, context=1024).max_running_requests == fits


def test_the_tokens_of_a_pipeline_rank_that_does_not_bind_name_the_rank_that_does():
    made = kvdock.plan_ranks(
        ModelSpec(name="m", architecture="M", layers=(mha(),) * 3, context_length=1024, dtype="bfloat16"),
        budget_bytes=GIB,
        parallel={"pp_size": 2, "pp_layers": (1, 2)},
        registry=core_only(),
    )
    first, last = (limit(plan, "tokens") for plan in made.plans)
    assert (first.factor, first.raised_by) == ("rank 1", ("more memory, or fewer layers, on rank 1",))
    assert (last.factor, first.effective) == ("budget", last.effective)


def tiered(*shares):
    """Spaces that follow the tokens, each with a host buffer of some bytes a slot."""
    spaces = {"full": Space(name="full", rule=SizeRule(per_token=(1, 1), needs=2))}
    for name, _ in shares:
        if name not in spaces:
            spaces[name] = Space(name=name, rule=SizeRule(per_token=(1, 1), of="full", needs=1))
    buffers = [
        Buffer(name=f"{name}.{i}", role="key", space=name, shape=(nbytes,), dtype="uint8", memory="host", guard=0)
        for i, (name, nbytes) in enumerate(shares)
    ]
    device = Buffer(name="kv", role="key", space="full", shape=(1,), dtype="uint8", guard=0)
    return Problem(spaces=spaces, buffers=(*buffers, device), page_size=1, host_budget_bytes=100 * 2**20)


@pytest.mark.parametrize(
    "shares",
    [
        (("full", 75), ("swa", 25)),
        (("full", 60), ("state", 40)),
        (("full", 50), ("index", 10), ("draft", 40)),
    ],
)
def test_one_host_budget_is_shared_between_the_pools(shares):
    # S-21: 75 and 25 bytes a slot share the budget 75 to 25; all hold the same tokens
    solver = Solver(tiered(*shares), 2**40)
    solution = solver.solve()
    assert solution.bound == "host_budget_bytes"
    assert len(set(solution.sizes.values())) == 1
    assert solution.tokens == 100 * 2**20 // 100
    assert host_nbytes(solver.problem, solution.sizes) == solution.tokens * 100 <= 100 * 2**20


def test_a_host_budget_below_one_request_says_how_much_works():
    small = Problem(
        **{name: getattr(tiered(("full", 75)), name) for name in ("spaces", "buffers", "page_size")},
        host_budget_bytes=149,
    )
    with pytest.raises(PlanError, match=r"host_budget_bytes=149 .*; give at least 150"):
        Solver(small, 2**40).solve()


PREFILL_ONLY = {
    "prefill_only_disable_kv_cache": True,
    "is_embedding": True,
    "prefix_cache": False,
    "attention_backend": "fa3",
    "max_running_requests": 8,
    "page_size": 16,
}


def test_a_cache_that_keeps_no_kv_has_the_tokens_of_the_one_that_it_replaces():
    with_kv = plan([mha()] * 4, options={"max_running_requests": 8, "page_size": 16}, context=4096)
    without = plan([mha()] * 4, options=PREFILL_ONLY, context=4096)
    assert without.spaces == with_kv.spaces
    assert without.groups[0].pool_cls.name == "NoOpPool"
    kv = sum(buffer.nbytes for buffer in with_kv.groups[0].buffers)
    assert with_kv.total_bytes - without.total_bytes == kv - 2  # a placeholder of one element in 16 bits stays


def test_a_cache_that_keeps_no_kv_takes_what_was_planned():
    pytest.importorskip("torch")
    without = plan([mha()] * 4, options=PREFILL_ONLY, context=4096)
    assert kvdock.build(without).allocated_bytes() == without.total_bytes


def test_scratch_of_a_token_is_part_of_its_cost_and_scratch_of_a_pool_is_not():
    # S-11: 16 layers of 1,152 bytes and 4,096 bytes of scratch a token, 4 GiB
    full = Space(name="full", rule=SizeRule(per_token=(1, 1), needs=2))
    cell = Buffer(
        name="kv",
        role="latent",
        space="full",
        shape=(1152,),
        dtype="uint8",
        layers=tuple(range(16)),
        guard=0,
        is_kv=True,
    )
    each = Buffer(name="scratch", role="scratch", space="full", shape=(4096,), dtype="uint8", guard=0)
    once = Buffer(name="scratch", role="scratch", shape=(4096,), dtype="uint8")

    def tokens(*buffers):
        return Solver(Problem(spaces={"full": full}, buffers=(cell, *buffers), page_size=1), 4 * GIB).solve().tokens

    assert tokens(each) == 4 * GIB // (18_432 + 4_096)
    assert tokens(once) == (4 * GIB - 4_096) // 18_432
    assert tokens() == 4 * GIB // 18_432


def test_requests_that_were_all_granted_are_bound_by_their_number():
    # 4 requests on 8 tokens: two each, so memory for more tokens would not bring a fifth.
    made = plan([mha(heads=1, dim=8)], options={"max_running_requests": 4, "max_total_tokens": 8}, context=64)
    found = limit(made, "requests")
    assert (found.effective, found.factor, found.raised_by) == (4, "max_running_requests", ("max_running_requests",))


@pytest.mark.parametrize(
    ("options", "raised_by"),
    [
        ({}, ("context_length with allow_longer_context",)),
        ({"context_length": 100}, ("context_length",)),
        ({"allow_longer_context": True}, ("context_length",)),
    ],
)
def test_a_context_beyond_the_models_own_needs_leave(options, raised_by):
    found = limit(plan([mha()], options=options, context=1000), "request_tokens")
    assert (found.factor, found.raised_by) == ("context_length", raised_by)


def test_a_ratio_of_windows_is_named_with_the_value_that_holds_more():
    # 0.8 sliding slots beside each full one: half as many leave room for more of those
    made = plan([mha(), mha(window_tokens=31)], budget=32 * MIB, options={"max_running_requests": 2}, context=4096)
    assert "swa_full_tokens_ratio=0.4" in limit(made, "tokens").raised_by
    again = plan(
        [mha(), mha(window_tokens=31)],
        budget=32 * MIB,
        options={"max_running_requests": 2, "swa_full_tokens_ratio": 0.4},
        context=4096,
    )
    assert again.max_total_num_tokens > made.max_total_num_tokens
