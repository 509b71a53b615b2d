"""The plugin as a whole, and what it says of its devices, keep the promises of kvdock's conformance kit."""

import kvdock
from kvdock.model import DSAParams
from kvdock.testing.suites import CPU, Case, DeviceSuite, PluginSuite
from kvdock_rocm import hooks
from others import cuda_device

DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128))
SPARSE = kvdock.ModelSpec(name="m", architecture="A", layers=(DSA,) * 2, context_length=256, dtype="bfloat16")
MI300X = hooks.device_catalogue()["mi300x"]


class TestRocm(PluginSuite):
    plugin = "rocm"
    cases = (
        Case(device=MI300X, options={"kv_cache_dtype": "fp8_e4m3"}, budget_bytes=2**28),
        Case(
            device=MI300X,
            model=SPARSE,
            options={"kv_cache_dtype": "fp8_e4m3", "attention_backend": "aiter"},
            budget_bytes=2**28,
        ),
    )
    foreign = (CPU, cuda_device("sm_90"))


class TestRocmDevices(DeviceSuite):
    plugin = "rocm"
    plugins = (("rocm", hooks),)
