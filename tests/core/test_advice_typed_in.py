"""Whatever is suggested, over a grid of models, memory, options, roles and ranks, is typed in again and does what it says."""

import itertools
import re
from collections import Counter

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, KVDockError
from kvdock.model import ConvBlock, ConvParams, DSAParams, LayerSpec, MHAParams, MLAParams, ModelSpec, StateParams
from kvdock.options import DEFAULTS, CacheOptions, Parallelism
from kvdock.startup import core_only

pytestmark = pytest.mark.once

REGISTRY = core_only()
MEMORY = ("budget_bytes", "weights_bytes", "reserve_bytes")
KNOWN = {*CacheOptions.__struct_fields__, *Parallelism.__struct_fields__, *MEMORY, "device", "draft"}
CONTEXT = 1024
CONV = ConvParams(blocks=(ConvBlock(heads=8, head_dim=8),), kernel=4)
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=64, v_head_dim=64))
WINDOW = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=64, v_head_dim=64), window_tokens=100)
MLA = LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=128, qk_rope_head_dim=16))
DSA = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(8, 8, 8)))
MODELS = {
    name: ModelSpec(name=name, architecture="M", layers=layers, context_length=CONTEXT, dtype="bfloat16")
    for name, layers in {
        "heads": (HEADS, HEADS),
        "window": (WINDOW, HEADS),
        "state": (STATE, HEADS),
        "latent": (MLA, MLA),
        "indexed": (DSA,),
    }.items()
}


def device(name, nbytes, granularity=1):
    return DeviceInfo(
        device_type="cpu",
        name=name,
        total_bytes=nbytes,
        free_before_load_bytes=nbytes,
        free_bytes=nbytes,
        granularity_bytes=granularity,
    )


IDLE, ROUNDING, SMALL = device("idle", 2**40), device("rounding", 2**40, 512), device("small", 2**20)
PLACES = {
    "little": {"device": IDLE, "budget_bytes": 2**13},
    "some": {"device": IDLE, "budget_bytes": 2**17 + 9},
    "rounded": {"device": ROUNDING, "budget_bytes": 2**18},
    "much": {"device": IDLE, "budget_bytes": 2**23},
    "any": {"budget_bytes": 2**15},
    "share": {"device": SMALL, "weights_bytes": 2**20 * 17 // 20},
    "small share": {"device": SMALL, "weights_bytes": 2**20 * 9 // 10 - 4000},
}
OPTIONS = (
    {},
    {"max_running_requests": 200},
    {"max_running_requests": 24, "page_size": 64},
    {"max_running_requests": 8, "context_length": 200},
    {"max_total_tokens": 3000},
    {"max_total_tokens": 1, "page_size": 4},
    {"kv_cache_dtype": "fp8_e4m3", "max_running_requests": 40},
    {"context_length": 2000},
    {"strict": True, "max_running_requests": 60},
)
OWN = {
    "state": (
        {"max_state_slots": 300, "max_running_requests": 90},
        {"max_state_slots": 6, "max_running_requests": 12},
        {"state_sizing": "ratio", "max_running_requests": 30},
        {"unified_memory": True},
    ),
    "window": ({"swa_full_tokens_ratio": 0.1, "page_size": 16}, {"unified_memory": True}),
}
"""Options that a model has beside those that all have."""
ROLES = ("none", "prefill", "decode")
SIZES = (
    {},
    {"tp_size": 4},
    {"tp_size": 8},
    {"tp_size": 4, "dp_size": 2, "dp_attention": True},
    {"tp_size": 8, "dcp_size": 2},
)
GRID = [
    case
    for name in MODELS
    for case in itertools.product([name], PLACES.values(), (*OPTIONS, *OWN.get(name, ())), ROLES, SIZES)
]
STEP = 23
"""Every so many of the grid are planned; no count of an axis has it as a factor, so values of all axes meet."""
MUST_OCCUR = {
    "budget_bytes",
    "context_length",
    "dcp_size",
    "dp_size",
    "kv_cache_dtype",
    "max_running_requests",
    "max_state_slots",
    "max_total_tokens",
    "mem_fraction_static",
    "page_size",
    "swa_full_tokens_ratio",
    "limit: kv_cache_dtype",
    "limit: swa_full_tokens_ratio",
}
"""What is suggested somewhere in the grid, for it to show anything."""


def planned(model, place, options, sizes):
    """Return a plan, with what is typed in."""
    return kvdock.plan(MODELS[model], **place, options=options, parallel=sizes, registry=REGISTRY)


def typed_in(given, change):
    """Return the plan of what was given with names and values changed, as texts of a message."""
    model, place, options, sizes = given
    place, options, sizes = dict(place), dict(options), dict(sizes)
    for name, text in change.items():
        value = read(text)
        if name in MEMORY:
            place[name] = value
        elif name in Parallelism.__struct_fields__:
            sizes[name] = value
        else:
            options[name] = value
    if "budget_bytes" in change:
        place.pop("weights_bytes", None)
    return planned(model, place, options, sizes)


def read(text):
    """Return a value as the command line reads it."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


PAIR = re.compile(r"\b([A-Za-z_]+)=(\d+\.\d+|[\w]+)")
GROUP = re.compile(rf"{PAIR.pattern}(?: with {PAIR.pattern})*")
SENTENCES = {
    r"give at least (?:[\d.]+ [KMG]iB \()?(\d[\d,]*) bytes": "budget_bytes",
    r"give at most (\d+)$": "context_length",
    r"the smallest that works is (\d\.\d+)": "mem_fraction_static",
    r"max_total_tokens=\d+ is .*; give at least (\d+)": "max_total_tokens",
    r"max_state_slots=\d+ leaves .* give at least (\d+)": "max_state_slots",
    r"the nearest tp_size that works is (\d+)": "tp_size",
    r"give max_running_requests=(\d+) or more": "max_running_requests",
}
"""A suggestion in words → what is to be given so."""


def said(given):
    """Return the pairs that a message states, since they were given or are defaults."""
    _, place, options, sizes = given
    one = dict.fromkeys(("tp_size", "dp_size", "dcp_size", "cp_size", "pp_size"), 1)
    stated = {**DEFAULTS, **one, "context_length": CONTEXT, **place, **options, **sizes}
    return {(name, str(value).lower()) for name, value in stated.items()}


def suggestions(text, given):
    """Return what a text suggests, each as names and values; what was given is stated, not suggested."""
    stated, found = said(given), []
    for group in GROUP.finditer(text):
        pairs = PAIR.findall(group[0])
        assert {name for name, _ in pairs} <= KNOWN, text
        if not all((name, value.lower()) in stated for name, value in pairs):
            found.append(dict(pairs))
    for pattern, name in SENTENCES.items():
        found += [{name: value.replace(",", "")} for value in re.findall(pattern, text)]
    return found


def form(line):
    """Return the complaint of a line, without its numbers."""
    return re.sub(r"[\d,.]+", "#", line.strip())[:60]


def is_settled(error, change, refused):
    """Return whether the line of an error that suggested `change` is in the way no longer; only the next one is.

    A combination that is refused has a line for each objection. One about memory is settled by a plan alone.
    """
    if isinstance(error, BudgetError):
        return False
    value = next(iter(change.values()))
    lines = [form(line) for line in str(error).splitlines() if re.search(rf"\b{re.escape(value)}\b", line)]
    return not {*lines} & {form(line) for line in str(refused).splitlines()}


def check_messages(text, given, counts, error=None):
    """Type in all that a text suggests."""
    for change in suggestions(text, given):
        try:
            made = typed_in(given, change)
        except KVDockError as refused:
            assert error and is_settled(error, change, refused), f"{given}: {change} of {text!r} is refused: {refused}"
        else:
            assert made.total_bytes <= made.budget_bytes
            counts.update(list(change))


def limits_by_name(made):
    return {limit.name: limit.effective for limit in made.limits}


def check_limits(made, given, counts):
    for limit in made.limits:
        for raiser in limit.raised_by:
            assert {name for name in re.findall(r"\w*_\w*", re.sub(r"=\w+", "", raiser)) if name} <= KNOWN, raiser
            if GROUP.fullmatch(raiser):
                again = typed_in(given, dict(PAIR.findall(raiser)))
                assert limits_by_name(again)[limit.name] > limit.effective, (given, limit)
                counts[f"limit: {raiser.partition('=')[0]}"] += 1


def test_what_errors_warnings_and_limits_suggest_does_what_they_say():
    counts = Counter()
    for model, place, options, role, sizes in GRID[::STEP]:
        given = (model, place, {**options, "role": role}, sizes)
        try:
            made = planned(*given)
        except KVDockError as error:
            check_messages(str(error), given, counts, error)
        else:
            check_messages(" ".join(made.warnings), given, counts)
            check_limits(made, given, counts)
    assert set(counts) >= MUST_OCCUR


def test_a_wrong_name_or_value_is_caught():
    given = ("heads", PLACES["little"], {"role": "none"}, {})
    with pytest.raises(AssertionError, match="max_requests=4"):
        check_messages("give max_requests=4", given, Counter())
    with pytest.raises(AssertionError, match="is refused: the smallest cache"):
        check_messages("it fits with page_size=2", given, Counter())
    with pytest.raises(AssertionError, match="is refused: page_size=0"):
        check_messages("give page_size=0", given, Counter())
