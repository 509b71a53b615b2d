"""The promises of every pool, and whole runs, on sparse latent attention."""

import random

import kvdock
import pytest
from kvdock.device import DeviceInfo
from kvdock.model import DSAParams, LayerSpec, ModelSpec
from kvdock.startup import core_only
from kvdock.testing.pool_suite import PoolSuite
from kvdock.testing.trace import Arrival

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.pools import DSAPool  # noqa: E402
from kvdock.testing.driver import drive  # noqa: E402

DEVICE = DeviceInfo(device_type="cpu", name="d", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)
LAYER = LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=8, index_head_dim=128))
MODEL = ModelSpec(name="m", architecture="M", layers=(LAYER,) * 2, context_length=64, dtype="bfloat16")


class TestDSAPool(PoolSuite):
    pool_cls = DSAPool
    values_are_in_keys = True
    device = DEVICE
    model = MODEL
    page_sizes = (1, 3, 16)
    seeds = (1,)


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8_e4m3", "index_dtype": "fp4"}, {"page_major": True, "page_size": 16}]
)
def test_requests_read_what_they_wrote(options):
    registry = core_only()
    given = {"page_size": 4, "max_total_tokens": 160, "max_running_requests": 4, **options}
    plan = kvdock.plan(MODEL, device=DEVICE, options=given, budget_bytes=2**22, registry=registry)
    rng = random.Random(7)
    arrivals = [
        Arrival(timestamp_ms=10.0 * i, input_length=rng.randint(1, 40), output_length=rng.randint(1, 20))
        for i in range(12)
    ]
    report = drive(kvdock.build(plan, device="cpu", debug=True), arrivals, seed=7)
    assert report.ok, report.problems
    assert report.finished == 12
    assert report.planned_bytes == report.allocated_bytes
