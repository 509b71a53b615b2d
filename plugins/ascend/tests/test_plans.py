"""Plans for NPUs as engines see them: limits, roles, what two sides agree on, and runs that check every value."""

from pathlib import Path

import kvdock
import pytest
from kvdock.builder import build
from kvdock.compat import compatible

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

MODELS = Path(__file__).parents[3] / "tests" / "models"


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa", "sliding", "pure", "linear"])
def test_one_request_is_one_request(plan, kind):
    """U-06"""
    assert plan(kind, max_running_requests=1).max_running_requests == 1


@pytest.mark.parametrize(
    ("requests", "options", "extra"), [(32, {}, 64), (33, {}, 0), (33, {"decode_extra_slots": 10}, 10)]
)
def test_requests_that_still_arrive_have_rows(plan, requests, options, extra):
    """G-04: rows of the request table are requests, arriving ones and padding."""
    made = plan(role="decode", max_running_requests=requests, context_length=1024, budget=2**30, **options)
    table = build(made, device="meta").req_to_token_pool.req_to_token
    assert table.shape[0] == requests + extra + 1
    assert table.dtype is torch.int32


def test_a_prefill_worker_takes_prompts_longer_than_its_sliding_side(plan):
    """G-05: 1,000,064 full tokens and a tenth of that sliding: one prompt may take the full side."""
    made = plan(
        "sliding",
        budget=2**35,
        role="prefill",
        max_total_tokens=1_000_064,
        swa_full_tokens_ratio=0.1,
        max_running_requests=4,
        chunked_prefill_size=8192,
        context_length=1_000_000,
        allow_longer_context=True,
    )
    assert made.spaces["full"] == made.max_total_num_tokens == 1_000_064
    assert made.spaces["swa"] <= 100_096


def test_sides_that_differ_are_told_before_the_first_request(plan):
    """G-01, G-02: every difference that matters is listed; sizes and contexts do not."""
    one = plan("mla", max_total_tokens=2048, context_length=1024)
    assert compatible(one, plan("mla", max_total_tokens=4096, context_length=2048)) == ()
    found = compatible(one, plan("mla", page_size=64, kv_cache_dtype="float16"))
    assert [(one.name, one.a, one.b, one.severity) for one in found] == [
        ("page_size", 128, 64, "incompatible"),
        ("latent.dtype", "bfloat16", "float16", "incompatible"),
        ("rope.dtype", "bfloat16", "float16", "incompatible"),
    ]


def test_latents_in_one_row_do_not_fit_those_that_lie_apart(plan, registry, model_of):
    """G-01: a side on another device keeps rows of 576 columns, and both differences are named."""
    other = kvdock.plan(
        model_of("mla"), device="cpu", options={"page_size": 128}, budget_bytes=2**28, registry=registry
    )
    found = compatible(plan("mla"), other)
    assert [(one.name, one.a, one.b) for one in found] == [
        ("latent.shape", (1, 512), (1, 576)),
        ("rope", "bfloat16 [1, 64] a slot", None),
    ]


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("llama-3.1-8b", {"NpuMHAPool"}),
        ("gpt-oss-20b", {"NpuMHAPool"}),
        ("deepseek-v3", {"NpuMLAPool"}),
        ("deepseek-v3.2", {"NpuDSAPool"}),
        ("qwen3-next-80b-a3b", {"NpuMHAPool", "NpuStatePool"}),
        ("kimi-linear-48b-a3b", {"NpuMLAPool", "NpuStatePool"}),
        ("mimo-v2-flash", {"NpuMHAPool"}),
    ],
)
@pytest.mark.parametrize("device", ["910b-32gb", "910c"])
def test_published_models_get_pools_and_allocators_of_one_query(plan, name, classes, device):
    made = plan(MODELS / f"{name}.json", device=device, budget=2**33, max_running_requests=4, context_length=4096)
    assert {group.pool_cls.name for group in made.groups} == classes
    assert {group.pool_cls.plugin for group in made.groups} == {"ascend"}
    inner = {choice.plugin for choice in made.outline.allocators if len(choice.query.spaces) == 1}
    assert inner == {"ascend"}


def test_a_plan_is_the_same_read_from_a_file(plan, registry):
    made = plan("linear", max_running_requests=2)
    again = kvdock.CachePlan.from_json(made.to_json(), registry=registry)
    assert again.total_bytes == made.total_bytes
    assert again.groups == made.groups


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mha", {}),
        ("mha", {"attention_backend": "ascend_fia"}),
        ("mla", {}),
        ("dsa", {"plugin_options": {"ascend": {"align_transfers": True}}}),
        ("sliding", {}),
        ("pure", {}),
        ("linear", {"max_running_requests": 3}),
        ("mha", {"role": "prefill"}),
        ("mla", {"role": "decode", "max_running_requests": 3}),
    ],
)
def test_requests_run_through_it_and_read_what_they_wrote(plan, kind, options):
    from kvdock.testing.driver import drive
    from kvdock.testing.trace import Arrival

    options = {"max_running_requests": 4, **options}
    cache = build(plan(kind, max_total_tokens=4096, context_length=1024, **options), device="cpu", debug=True)
    arrivals = [Arrival(timestamp_ms=float(i), input_length=90 + 70 * i, output_length=40) for i in range(6)]
    report = drive(cache, arrivals, seed=1)
    assert report.finished == 6
    assert report.checks
