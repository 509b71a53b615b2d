"""What requests hold where most rows are on the host: asked of a plan, and of a cache that was built from it."""

import kvdock
import pytest
from click.testing import CliRunner
from kvdock.cli import main
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.remedies import again
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

PARAMS = DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128)
ROW, KEY = (128 + 8) * 2, 132
"""Bytes of a latent in 16 bits, and of an index key of 128 with its scale."""
NEEDS = 12
"""Device slots of a request: twice the 4 that a step reads, and a page of 4 for the newest tokens."""


def plan(budget=2**24, **options):
    """Return a plan of one layer, with two full and two host slots for each on the device, in pages of 4."""
    layer = LayerSpec(kind="dsa", params=PARAMS)
    model = ModelSpec(name="m", architecture="M", layers=(layer,), context_length=256, dtype="bfloat16")
    given = {"page_size": 4, "max_running_requests": 2, "hisparse": True, "hisparse_top_k": 4, **options}
    return kvdock.plan(model, device="cpu", budget_bytes=budget, options=given, registry=core_only())


def kv_bytes(made):
    return sum(buffer.nbytes for buffer in made.buffers if buffer.is_kv and buffer.memory == "device")


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_bytes_a_token_are_those_that_a_token_more_takes(ratio):
    less, more = (plan(max_total_tokens=tokens, hisparse_host_to_device_ratio=ratio) for tokens in (100, 900))
    tokens = more.max_total_num_tokens - less.max_total_num_tokens
    assert tokens == 800 * ratio
    # Each token has its index key on the device, and one of `ratio` has its row there.
    assert less.bytes_per_token.kv == KEY + ROW / ratio
    assert kv_bytes(more) - kv_bytes(less) == tokens * less.bytes_per_token.kv
    # 8 bytes of the map and the allocators' own lists, which cost the same a slot.
    assert kv_bytes(more) == pytest.approx(more.max_total_num_tokens * more.bytes_per_token.kv, rel=0.01)


def held(answer):
    return {need.name: need.needed for need in answer.spaces}


@pytest.mark.parametrize(
    ("length", "tokens", "device"), [(1, 4, 4), (9, 12, 12), (12, 12, 12), (13, 16, 12), (110, 112, 12)]
)
def test_a_request_holds_a_device_buffer_at_most(length, tokens, device):
    answer = kvdock.serves(plan(max_total_tokens=128), 2, length)
    assert answer.fits
    assert held(answer) == {"full": 2 * tokens, "device": 2 * device, "host": 2 * tokens, "requests": 2}
    assert answer.kv_bytes == 2 * (tokens * KEY + device * ROW)
    assert answer.host_kv_bytes == 2 * tokens * ROW


def test_the_longest_requests_are_bound_by_the_host():
    found = kvdock.longest(plan(max_total_tokens=128), 2)
    assert (found.length, found.bound) == (128, "full, host")
    assert found.host_kv_bytes == 256 * ROW
    assert found.kv_bytes == 256 * KEY + 2 * NEEDS * ROW


@pytest.mark.parametrize(("tokens", "runs"), [(24, 2), (20, 1)])
def test_requests_that_arrive_on_the_host_run_as_the_answer_says(tokens, runs):
    made = plan(max_total_tokens=tokens, role="decode")
    assert made.concurrency(20) == runs
    cache = kvdock.build(made, debug=True)
    allocator = cache.token_to_kv_pool_allocator
    buffers = []
    for request in ("a", "b")[:runs]:
        assert cache.admit(request, 20, arriving=True) is not None
        cache.req_to_token_pool.start([request])
        assert allocator.reserve_host(request, 20) is not None
        buffers.append(allocator.alloc_device_buffer(request, device_start=20))
    assert [len(buffer) for buffer in buffers] == [NEEDS] * runs
    assert allocator.max_device_buffers == runs
    cache.check()


def test_prompts_written_chunk_by_chunk_through_the_device_fit_as_well():
    # 24 device slots hold the two buffers, 48 full and host slots two requests of 24 tokens.
    made = plan(max_total_tokens=24)
    assert made.max_length(2) == 24
    cache = kvdock.build(made, debug=True)
    table, allocator, pool = cache.req_to_token_pool, cache.token_to_kv_pool_allocator, cache.token_to_kv_pool
    for request in ("a", "b"):
        slots = cache.admit(request, NEEDS)
        assert allocator.reserve_host(request, 24) is not None
        row = table.row_of(request)
        for start, end in ((0, NEEDS), (NEEDS, 24)):
            if start:
                last = table.req_to_token[row, start - 1 : start].long()
                batch = (torch.tensor([start]), [start], torch.tensor([end]), [end])
                slots = allocator.alloc_extend(*batch, last, end - start, owners=[request])
                table.write([row], [start], [end], slots)
            pool.offload(slots, allocator.host_slots(request, start, end))
            cache.evict([request], [end])
        assert len(allocator.alloc_device_buffer(request, device_start=24)) == NEEDS
    cache.check()
    assert not kvdock.serves(made, 2, 25).fits
    assert cache.admit("c", 1) is None


def test_the_smallest_budget_and_tokens_that_were_fixed_count_both_tiers():
    made = plan(max_total_tokens=20)
    answer = kvdock.serves(made, 2, 30)
    # 2 requests of 32 slots: 64 full slots are 32 on the device, more than two buffers.
    assert answer.remedies[0].change == {"max_total_tokens": 32}
    assert kvdock.serves(again(made, {"max_total_tokens": 32}), 2, 30).fits
    short = kvdock.serves(made, 2, 18)
    # 40 full slots hold them, but 20 on the device are no two buffers.
    assert short.reasons == ("space device: 24 slots are needed, 20 are there, 4 are lacking",)
    assert short.remedies[0].change == {"max_total_tokens": 24}
    budget = kvdock.serves(plan(2**14), 2, 30).budget_bytes
    assert kvdock.serves(plan(budget), 2, 30).fits
    assert not kvdock.serves(plan(budget - 1), 2, 30).fits


def test_bytes_on_the_device_and_on_the_host_are_told_apart():
    model = "tests/models/deepseek-v3.2.json"
    place = ["--memory", "16GiB", "--page-size", "64", "--option", "hisparse=true"]
    for question in (["--requests", "40", "--length", "20000"], ["--requests", "40", "--max-length"]):
        result = CliRunner().invoke(main, ["plan", model, *place, *question], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.stderr
        (line,) = (line for line in result.stdout.splitlines() if line.startswith("KV that they hold"))
        slots = 40 * (20032 if "--length" in question else 9856)
        device, host = slots * 61 * 132 + 40 * 4160 * 61 * 1152, slots * 61 * 1152
        assert f"({device:,} bytes) on the device" in line
        assert f"({host:,} bytes) on the host, a rank" in line
