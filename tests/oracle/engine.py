"""The engine's cases as plans of kvdock, and its sizing: the buffer list of a plan edited to what the engine charges.

The engine leaves some memory out of its sums and charges some that it never allocates; the second half of
this module has every such edit. None of them is an option of kvdock.
"""

import json
from fractions import Fraction
from pathlib import Path

import msgspec
from kvdock.costs import slot_bytes
from kvdock.device import DeviceInfo
from kvdock.edge import read_models
from kvdock.layout import FULL, REQUESTS, STATE, SWA, TARGET, Buffer
from kvdock.options import draft_parallels, make_options, make_parallelism
from kvdock.outline import draw_outline
from kvdock.planner import plan_from
from kvdock.sizing import Problem, Solver, token_factors
from kvdock.startup import core_only

_FILE = json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))
CONFIGS = _FILE["configs"]
CASES = {case["name"]: case for case in _FILE["cases"]}

SAME_NAME = (
    "page_size",
    "kv_cache_dtype",
    "max_total_tokens",
    "max_running_requests",
    "context_length",
    "chunked_prefill_size",
    "swa_full_tokens_ratio",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "prefill_only_disable_kv_cache",
)
OTHER_NAME = {
    "speculative_eagle_topk": "speculative_topk",
    "enable_page_major_kv_layout": "page_major",
    "enable_linear_replayssm": "replay_rings",
    "enable_unified_memory": "unified_memory",
    "disaggregation_mode": "role",
    "disaggregation_decode_extra_slots": "decode_extra_slots",
    "max_mamba_cache_size": "max_state_slots",
}
EXTRA_BUFFER = {"no_buffer": "off", "extra_buffer": "on", "extra_buffer_lazy": "lazy"}
EVERY_LAYER_FULL = frozenset({"gemma-2-9b", "mistral-7b-v0.1-sliding-window"})
"""Models whose windows the engine does not use; its option for that is read as well."""
PREFILL_ONLY = {"is_embedding": True, "prefix_cache": False, "attention_backend": "fa3"}
"""What goes with a model that keeps no cache; the engine's figures were taken without its check of these."""
STORED_LATENT_NBYTES, CHARGED_LATENT_NBYTES = 656, 576
"""Bytes of an 8-bit latent row with its scales, and what the engine charges for it."""
DEVICE = DeviceInfo(
    device_type="cpu",
    name="oracle",
    total_bytes=2**44,
    free_before_load_bytes=2**44,
    free_bytes=2**44,
    capabilities=frozenset({"skip_kv_cache:fa3"}),
)


def options_of(case):
    """Return the engine's options as kvdock names them."""
    given = case["options"]
    values = {name: given[name] for name in SAME_NAME if name in given}
    values |= {ours: given[theirs] for theirs, ours in OTHER_NAME.items() if theirs in given}
    values["prefix_cache"] = not given.get("disable_radix_cache", False)
    if "mamba_radix_cache_strategy" in given:
        values["state_extra_buffer"] = EXTRA_BUFFER[given["mamba_radix_cache_strategy"]]
    if case["name"] in EVERY_LAYER_FULL or given.get("disable_hybrid_swa_memory"):
        values["hybrid_swa"] = "off"
    if given.get("prefill_only_disable_kv_cache"):
        values |= PREFILL_ONLY
    if "draft" in case:  # else the target's own extra layers draft
        values["draft"] = CONFIGS[case["draft"]]
    return values


def parallel_of(case, **changed):
    """Return the parallel sizes and the rank."""
    given = case["options"]
    workers = given.get("attn_dp", 1)
    values = {
        "tp_size": given.get("tp", 1),
        "pp_size": given.get("pp", 1),
        "pp_rank": given.get("pp_rank", 0),
        "dp_size": workers,
        "dp_attention": workers > 1,
    }
    return make_parallelism(values | changed)


def outline_of(case, values=None, **changed):
    """Return all but the sizes of the plan of a case; `changed` are other parallel sizes."""
    models, device, options, _, registry = _inputs(case, DEVICE, values)
    parallels = draft_parallels(options, parallel_of(case, **changed), len(models))
    return draw_outline(models, device, options, parallels, registry)


def plan_of(case, values=None, budget_bytes=None):
    """Return the plan of a case as kvdock makes it, `values` replacing options, for its own budget if none is given."""
    budget = budget_of(case) if budget_bytes is None else budget_bytes
    return plan_from(*_inputs(case, DEVICE, values), budget_bytes=budget)


def stated_plan_of(case):
    """Return the plan for the sizes that the engine found, stated outright."""
    result, workers = case["result"], case["options"].get("attn_dp", 1)
    values = {"max_running_requests": result["requests"] * workers, "max_total_tokens": result["tokens"]}
    if "state_pool" in result:  # a decode worker has more than its sizing says: those of requests that still arrive
        values["max_state_slots"] = result["state_pool"]["mamba_cache.temporal"]["shape"][1] - 1
    return plan_of(case, values, budget_bytes=2**43)


def fraction_plan_of(case, fraction=None):
    """Return the plan for a share of the memory that the case gives, the weights being loaded."""
    given = case["options"]
    before, free = (int(Fraction(str(given[name])) * 2**30) for name in ("pre_model_load_gb", "available_gb"))
    device = msgspec.structs.replace(DEVICE, total_bytes=before, free_before_load_bytes=before, free_bytes=free)
    fraction = fraction or given["mem_fraction_static"]
    return plan_from(*_inputs(case, device, {"mem_fraction_static": fraction}))


def _inputs(case, device, values):
    registry = core_only()
    options = make_options(options_of(case) | (values or {}))
    models, _ = read_models(config_of(case), options, registry)
    return models, device, options, parallel_of(case), registry


def config_of(case):
    """Return the config of the target model."""
    return CONFIGS[case["config"]]


def budget_of(case):
    """Return the bytes that the engine's sizing was given."""
    given = case["options"]
    if "budget_bytes" in given:
        return given["budget_bytes"]
    slack = Fraction(str(given["pre_model_load_gb"])) * (1 - Fraction(str(given["mem_fraction_static"])))
    return int((Fraction(str(given["available_gb"])) - slack) * 2**30)


# The engine's sums.


def sizing_options(case):
    """Return how the engine sizes states: by their share of the budget while it keeps prefixes."""
    by_share = has_states(case) and not case["options"].get("disable_radix_cache")
    return {"state_sizing": "ratio"} if by_share else {}


def has_states(case):
    """Return whether the model keeps states per request."""
    return "state_bytes" in case.get("result", {})


def charged(buffer):
    """Return a buffer as the engine counts it: no padding rows, no alignment, 8-bit latents with scales at 576 bytes."""
    is_scaled = buffer.role == "latent" and buffer.dtype == "uint8" and buffer.row_nbytes == STORED_LATENT_NBYTES
    return msgspec.structs.replace(
        buffer,
        shape=(CHARGED_LATENT_NBYTES,) if is_scaled else buffer.shape,
        guard=0,
        round_rows_to=1,
        row_bytes_align=1,
        base_align=1,
        storage="",
    )


def kv_buffers(outline):
    """Return what holds tokens in the target's pools, workspaces included, as the engine charges it."""
    return [
        charged(buffer)
        for buffer in outline.sized_buffers
        if buffer.worker == TARGET
        and (buffer.is_kv or buffer.role == "workspace")
        and buffer.space not in (None, STATE, REQUESTS)
    ]


def lump(name, space, nbytes):
    """Return a buffer that stands for so many bytes a slot."""
    return Buffer(name=name, role=name, space=space, shape=(nbytes,), dtype="uint8", guard=0, is_kv=True)


def draft_charge(outline, target):
    """Return the bytes a token that the engine charges for drafts: its target's, layer for layer."""
    drafts = sum(layer.kind != "none" for model in outline.models[1:] for layer in model.layers)
    full = [buffer for buffer in target if buffer.space == FULL]
    if SWA in outline.spaces:
        return sum(buffer.row_nbytes for buffer in full) * drafts
    cell = int(sum(slot_bytes(buffer, outline.spaces) for buffer in full))
    layers = {layer for buffer in full for layer in buffer.layers}
    return int(cell * (1 + drafts / len(layers))) - cell


def workspace_charge(case, target):
    """Return the bytes a token of the 8-bit copies that the engine charges for power-of-two scales but never makes."""
    if case["options"].get("kv_cache_dtype") != "fp4_mx_block16":
        return 0
    return sum(2 * buffer.row_nbytes for buffer in target if buffer.role in ("key", "value"))


def engine_buffers(case, outline):
    """Return what the engine charges: KV alone, drafts at the target's size, states of every stage's layers."""
    target = kv_buffers(outline)
    extra = [lump("workspace", FULL, workspace_charge(case, target))]
    if len(outline.models) > 1:
        extra.append(lump("draft", FULL, draft_charge(outline, target)))
    if has_states(case):
        slot = state_bytes(case)
        extra.append(lump("states", STATE, slot))
        steps = case["options"].get("speculative_num_draft_tokens", 0)
        extra.append(lump("snapshots", REQUESTS, slot * steps))
    return [*target, *(buffer for buffer in extra if buffer.row_nbytes)]


def state_bytes(case):
    """Return the bytes of a state slot without rings, of all stages' layers together."""
    outline = outline_of(case, sizing_options(case), pp_size=1, pp_rank=0)
    kept = [b for b in outline.buffers if b.space == STATE and b.is_kv and b.role in ("conv", "temporal")]
    return sum(buffer.row_nbytes * len(buffer.layers) for buffer in kept)


def engine_spaces(outline):
    """Return the spaces as the engine sizes them: no share for tables, no states for requests that still arrive."""
    spaces = dict(outline.spaces)
    rule = msgspec.structs.replace(spaces[REQUESTS].rule, shares=())
    spaces[REQUESTS] = msgspec.structs.replace(spaces[REQUESTS], rule=rule)
    if STATE in spaces and spaces[STATE].rule.per_request[0]:
        rule = msgspec.structs.replace(spaces[STATE].rule, fixed=0)
        spaces[STATE] = msgspec.structs.replace(spaces[STATE], rule=rule)
    return spaces


def engine_solver(case, **changed):
    """Return the solver of a case with every approximation of the engine; `changed` are other parallel sizes."""
    outline = outline_of(case, sizing_options(case), **changed)
    problem = Problem(
        spaces=engine_spaces(outline),
        buffers=tuple(engine_buffers(case, outline)),
        page_size=outline.options.values.page_size,
        cap_tokens=case["options"].get("max_total_tokens"),
    )
    return Solver(problem, budget_of(case))


def cell_of(solver):
    """Return the bytes of one token, the sliding slots that belong to it as a fraction."""
    factors = token_factors(solver.problem.spaces)
    return sum(slot_bytes(b, solver.problem.spaces) * factors[b.space] for b in solver.problem.buffers)


def follows_ratio(solver):
    """Return whether sliding slots follow the full ones by a ratio."""
    return SWA in solver.problem.spaces and solver.problem.spaces[SWA].rule.per_token[0] > 0


def rank_tokens(case):
    """Return the tokens that each pipeline stage holds, before they agree."""
    return [own_tokens(engine_solver(case, pp_rank=rank)) for rank in range(case["options"].get("pp", 1))]


def own_tokens(solver):
    """Return the tokens as the engine finds them: it divides by the cost of a token, fractions of sliding slots included."""
    solution = solver.solve()
    if not follows_ratio(solver):
        return solution.tokens
    page = solver.problem.page_size
    tokens = int(solver.budget_bytes // cell_of(solver)) // page * page
    if solver.problem.cap_tokens is not None:
        tokens = min(tokens, solver.problem.cap_tokens // page * page)
    assert 0 <= solution.tokens - tokens <= page  # exact sizes hold a page more where the fractions add up to one
    return tokens


def engine_sizes(case):
    """Return the sizes of all spaces at the tokens that the stages agree on."""
    solver = engine_solver(case)
    if case["options"].get("pp", 1) == 1 and not follows_ratio(solver):
        return solver.solve().sizes
    return solver.sizes(min(rank_tokens(case)))
