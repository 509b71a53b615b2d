"""Pools in the encodings and rows of AMD devices keep the promises of kvdock's pools."""

from typing import ClassVar

import kvdock
import msgspec
from kvdock.model import DSAParams, MLAParams
from kvdock.testing.suites import PoolSuite
from kvdock_rocm import hooks
from kvdock_rocm.pools import RocmDSAPool, RocmMHAPool, RocmMLAPool

MLA = kvdock.LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=64, qk_rope_head_dim=16))
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128))


def model(layer):
    return kvdock.ModelSpec(name="m", architecture="A", layers=(layer,) * 2, context_length=256, dtype="bfloat16")


class OnMI300X(PoolSuite):
    plugins = (("rocm", hooks),)
    device = msgspec.structs.replace(hooks.device_catalogue()["mi300x"], granularity_bytes=1)
    options: ClassVar = {"kv_cache_dtype": "fp8_e4m3"}


class TestRocmMHAPool(OnMI300X):
    pool_cls = RocmMHAPool


class TestRocmMLAPool(OnMI300X):
    model = model(MLA)
    pool_cls = RocmMLAPool
    values_are_in_keys = True


class TestRocmDSAPool(OnMI300X):
    model = model(DSA)
    options: ClassVar = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "aiter"}
    page_sizes = (1, 16, 64)
    pool_cls = RocmDSAPool
    values_are_in_keys = True
