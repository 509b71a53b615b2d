"""Pools with raw rows keep the promises of kvdock's pools."""

from typing import ClassVar

import kvdock
import msgspec
from kvdock.model import DSAParams
from kvdock.testing.suites import PoolSuite
from kvdock_cuda import hooks
from kvdock_cuda.pools import RawDSAPool

LAYER = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128))


class TestRawDSAPool(PoolSuite):
    plugins = (("cuda", hooks),)
    device = msgspec.structs.replace(hooks.device_catalogue()["h200"], granularity_bytes=1)
    model = kvdock.ModelSpec(name="m", architecture="A", layers=(LAYER,) * 2, context_length=256, dtype="bfloat16")
    options: ClassVar = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "trtllm"}
    page_sizes = (64,)
    pool_cls = RawDSAPool
    values_are_in_keys = True
    fp8_dtypes = ("fp8_e4m3",)
