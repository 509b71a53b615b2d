"""Whatever is planned, on however many ranks: never over a budget, never a page short, alike on all ranks."""

import itertools
import re

import kvdock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvdock.device import DeviceInfo
from kvdock.errors import KVDockError
from kvdock.layout import REQUESTS
from kvdock.model import (
    ConvBlock,
    ConvParams,
    DSAParams,
    HybridParams,
    LayerSpec,
    MHAParams,
    MLAParams,
    ModelSpec,
    SparseParams,
    StateParams,
)
from kvdock.sizing import Problem, Solver
from kvdock.startup import core_only

DEVICES = [
    DeviceInfo(
        device_type="cpu",
        name="rounding",
        total_bytes=2**40,
        free_before_load_bytes=2**40,
        free_bytes=2**40,
        granularity_bytes=granularity,
    )
    for granularity in (1, 512, 65_536)
]
CONTEXT = 512


def attention(kind, params, **fields):
    return LayerSpec(kind=kind, params=params, **fields)


def heads(count, dim=16, window=None):
    return attention("mha", MHAParams(num_kv_heads=count, head_dim=dim, v_head_dim=dim), window_tokens=window)


def state():
    conv = ConvParams(blocks=(ConvBlock(heads=4, head_dim=8),), kernel=4)
    return StateParams(conv=(conv,), temporal=(4, 8, 8))


MLA = attention("mla", MLAParams(kv_lora_rank=64, qk_rope_head_dim=16))
DSA = attention("dsa", DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
SPARSE = attention("sparse", SparseParams(num_kv_heads=4, head_dim=16, v_head_dim=16, index_head_dim=16))
STATE_LAYER = attention("state", state())
BOTH = attention("hybrid", HybridParams(num_kv_heads=4, head_dim=16, v_head_dim=16, state=state()))
SHAPES = {
    "heads": [heads(4)],
    "two shapes": [heads(4), heads(8, 32)],
    "latent": [MLA],
    "indexed latent": [DSA],
    "indexed heads": [SPARSE, heads(4)],
    "sliding and full": [heads(4), heads(4, window=31)],
    "sliding of another shape": [heads(8, window=100), heads(4, 32), heads(4, window=31)],
    "sliding": [heads(4, window=31)],
    "states": [STATE_LAYER],
    "states and full": [STATE_LAYER, STATE_LAYER, heads(4)],
    "state and heads in a layer": [BOTH],
    "states, sliding and full": [STATE_LAYER, heads(4, window=31), heads(4)],
}
SPECULATION = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}


@st.composite
def models(draw):
    cycle = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    layers = itertools.islice(itertools.cycle(cycle), draw(st.integers(1, 9)))
    return ModelSpec(name="m", architecture="M", layers=tuple(layers), context_length=CONTEXT, dtype="bfloat16")


@st.composite
def parallels(draw):
    attn_tp, cp, dp = (draw(st.sampled_from([1, 1, 2])) for _ in range(3))
    attention = draw(st.booleans())
    sizes = {"tp_size": attn_tp * cp * (dp if attention else 1), "cp_size": cp, "dp_size": dp}
    return {**sizes, "dp_attention": attention, "pp_size": draw(st.sampled_from([1, 2, 2, 3]))}


@st.composite
def drafts(draw):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": 16,
        "hidden_size": 64,
        "max_position_embeddings": CONTEXT,
        "torch_dtype": "bfloat16",
    }
    layers = config["num_hidden_layers"]
    fields = {"workers": draw(st.sampled_from([1, layers]))}
    if draw(st.booleans()):
        fields["dp_attention"] = False
    return {**config} if draw(st.booleans()) else {"model": config, **fields}


@st.composite
def choices(draw):
    """Draw options; a choice that is not drawn stays out, so that defaults are met often."""
    maybe = {
        "page_size": st.sampled_from([4, 16, 64]),
        "kv_cache_dtype": st.sampled_from(["fp8_e4m3", "float32"]),
        "prefix_cache": st.just(False),
        "overlap_schedule": st.just(False),
        "max_running_requests": st.integers(1, 70),
        "max_total_tokens": st.integers(1, 20_000),
        "context_length": st.integers(16, CONTEXT),
        "chunked_prefill_size": st.integers(1, 300),
        "swa_full_tokens_ratio": st.sampled_from([0.1, 0.5, 1.0]),
        "hybrid_swa": st.just("off"),
        "role": st.sampled_from(["prefill", "decode"]),
        "max_state_slots": st.integers(1, 200),
        "state_sizing": st.just("ratio"),
        "state_memory_ratio": st.sampled_from([0.1, 0.9, 4.0]),
        "request_table_share": st.sampled_from([0.001, 0.5, 1.0]),
        "page_major": st.just(True),
    }
    names = draw(st.lists(st.sampled_from(sorted(maybe)), unique=True, max_size=5))
    chosen = {name: draw(maybe[name]) for name in names}
    if draw(st.integers(0, 2)) == 0:
        chosen |= {**SPECULATION, "draft": draw(st.one_of(drafts(), st.tuples(drafts(), drafts())))}
    return chosen


ADVICE = (
    (r"max_running_requests=(\d+) fits", "max_running_requests"),
    (r"give at least [^(]*?\(?(\d[\d,]*) bytes", "budget_bytes"),
    (r"max_total_tokens=\d+ is .* give at least (?:page_size=)?(\d+)", "max_total_tokens"),
    (r"max_state_slots=\d+ leaves .* give at least (\d+)", "max_state_slots"),
    (r"give max_running_requests=(\d+) or more", "max_running_requests"),
    (r"pp_size=\d+ is more than the model's (\d+) layers", "pp_size"),
    (r"nearest tp_size that works is (\d+)", "tp_size"),
    (r"nearest that works is (\d+)", "page_size"),
)
"""What an error says that would work, and what is to be given so."""


def follow(error, options, parallel, budgets):
    """Return what the advice in an error changes: form, options, parallel sizes and budgets."""
    text = str(error)
    if "nothing in this plan reads" in text:
        unread = [name for name in options if re.search(rf"\b{name}=", text)]
        assert unread, text
        return text, {name: value for name, value in options.items() if name not in unread}, parallel, budgets
    for pattern, name in ADVICE:
        found = re.search(pattern, text, re.DOTALL)
        if found is None:
            continue
        value = int(found[1].replace(",", ""))
        who, sentence = text.split(":", 1)
        form = f"{who}: {re.sub(r'[0-9,]+', '', sentence[:80])} {name}"  # the sentence without its numbers
        if name == "budget_bytes":
            rank = int(re.match(r"rank (\d+)", text)[1])
            return form, options, parallel, [*budgets[:rank], value, *budgets[rank + 1 :]]
        if name in parallel:
            return form, options, {**parallel, name: value}, budgets
        return form, {**options, name: value}, parallel, budgets
    raise AssertionError(f"no advice to follow: {text}") from error


def planned(model, device, options, parallel, budgets):
    """Return the plans of all ranks; advice in a refusal is followed, once each, until they are planned."""
    seen = set()
    while True:
        budgets = budgets[: parallel["pp_size"] * parallel["tp_size"]]
        try:
            made = kvdock.plan_ranks(
                model,
                device=device,
                options=options,
                parallel=parallel,
                budget_bytes=budgets,
                registry=core_only(),
            )
        except KVDockError as error:
            form, options, parallel, budgets = follow(error, options, parallel, budgets)
            assert form not in seen, error
            seen.add(form)
        else:
            return made, budgets


def solver_of(plan):
    """Return a solver for what one rank was asked, with what the ranks agreed on fixed."""
    fixed = {
        name: plan.spaces[name] for name, space in plan.outline.spaces.items() if name == REQUESTS or space.rule.shares
    }
    problem = Problem(
        spaces=plan.outline.spaces,
        buffers=plan.outline.buffers,
        page_size=plan.options.values.page_size,
        granularity_bytes=plan.device.granularity_bytes,
        cap_tokens=plan.options.values.max_total_tokens,
    )
    return Solver(problem, plan.budget_bytes, fixed)


def some_kv_follows(deployment):
    plans = deployment.plans
    return any(
        plan.costs.per_slot[name].kv for plan in plans for name in plan.spaces if name not in (REQUESTS, "state")
    )


MOST_RANKS = 24
BYTES = st.integers(14, 26).flatmap(lambda power: st.integers(2**power, 2 ** (power + 1)))
MEMORY = st.one_of(
    BYTES.map(lambda same: [same] * MOST_RANKS), st.lists(BYTES, min_size=MOST_RANKS, max_size=MOST_RANKS)
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(model=models(), device=st.sampled_from(DEVICES), options=choices(), parallel=parallels(), budgets=MEMORY)
def test_no_rank_is_over_its_budget_and_none_is_a_page_short(model, device, options, parallel, budgets):
    made, budgets = planned(model, device, options, parallel, budgets)
    for rank, plan in enumerate(made.plans):
        assert plan.total_bytes <= budgets[rank] == plan.budget_bytes
        assert plan.total_bytes == sum(buffer.nbytes for buffer in plan.buffers if buffer.memory == "device")
        assert plan.spaces == made.plans[0].spaces
        assert plan.agreement.rank == rank
        for name, space in plan.outline.spaces.items():
            assert plan.spaces[name] >= space.rule.needs
            assert name == REQUESTS or space.issued_by != "allocator" or plan.spaces[name] % space.page_size == 0
    if some_kv_follows(made):
        more = made.agreement.tokens + made.binding.options.values.page_size
        assert solver_of(made.binding).broken(more) is not None
        others = [plan for plan in made.plans if plan.agreement.own_tokens != made.agreement.tokens]
        assert made.agreement.next_tokens == min((plan.agreement.own_tokens for plan in others), default=None)
        assert all(solver_of(plan).broken(plan.agreement.own_tokens) is None for plan in others)
