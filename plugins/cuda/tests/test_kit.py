"""The plugin as a whole, and what it says of its devices, keep the promises of kvdock's conformance kit."""

import kvdock
from kvdock.model import DSAParams
from kvdock.testing.suites import CPU, Case, DeviceSuite, PluginSuite
from kvdock_cuda import hooks
from others import cuda_device

DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128))
SPARSE = kvdock.ModelSpec(name="m", architecture="A", layers=(DSA,) * 2, context_length=256, dtype="bfloat16")
H200 = hooks.device_catalogue()["h200"]


class TestCuda(PluginSuite):
    plugin = "cuda"
    cases = (
        Case(device=H200, budget_bytes=2**28),
        Case(
            device=H200,
            model=SPARSE,
            options={"kv_cache_dtype": "fp8_e4m3", "attention_backend": "trtllm"},
            budget_bytes=2**28,
        ),
    )
    foreign = (CPU, cuda_device("gfx942"))


class TestCudaDevices(DeviceSuite):
    plugin = "cuda"
    plugins = (("cuda", hooks),)
