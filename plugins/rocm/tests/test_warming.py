"""After `build` nothing is left to compile or load: a kernel set and torch itself are watched for what they run."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import kvdock
import pytest
from kvdock.model import DSAParams
from kvdock.startup import core_only
from kvdock.testing.mocks import mock_plugin

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.interface import Kernels  # noqa: E402
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock_rocm.kernels import extended  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

MODELS = Path(__file__).parents[3] / "tests" / "models"
HERE = kvdock.DeviceInfo(
    device_type="cpu", name="here", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40
)
SLIDING = kvdock.ModelSpec(
    name="sliding",
    architecture="A",
    layers=(
        kvdock.LayerSpec(
            kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=64, v_head_dim=64), window_tokens=63
        ),
    )
    * 2,
    context_length=256,
    dtype="bfloat16",
)
HOSTED = kvdock.ModelSpec(
    name="hosted",
    architecture="A",
    layers=(kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128)),)
    * 2,
    context_length=256,
    dtype="bfloat16",
)
CASES = {
    "tokens": ("llama-3.1-8b", {"page_size": 1}),
    "pages": ("llama-3.1-8b", {}),
    "8 bits": ("llama-3.1-8b", {"kv_cache_dtype": "fp8"}),
    "4 bits": ("llama-3.1-8b", {"kv_cache_dtype": "fp4"}),
    "in order": ("llama-3.1-8b", {"role": "prefill"}),
    "arriving": ("llama-3.1-8b", {"role": "decode"}),
    "latents": ("deepseek-v3", {}),
    "sparse latents": ("deepseek-v3.2", {"kv_cache_dtype": "fp8"}),
    "on the host": (HOSTED, {"hisparse": True}),
    "sliding": ("gpt-oss-20b", {}),
    "all sliding": (SLIDING, {}),
    "states": ("qwen3-next-80b-a3b", {}),
    "sparse": ("minimax-m3-synthetic", {}),
}


class Forms:
    """Notes each call of a kernel set by what a compiler would specialise it on: types, widths and the page size."""

    def __init__(self):
        self.seen = set()

    def note(self, method, arguments):
        form = tuple(self._of(name, value) for name, value in arguments.items())
        self.seen.add((method, form))

    def _of(self, name, value):
        if isinstance(value, torch.Tensor):
            return (name, value.dtype, tuple(value.shape[2:]), value.stride()[1:])
        if isinstance(value, list | tuple):
            return (name, tuple(self._of("", each) for each in value))
        return (name, value if name == "page_size" else type(value))


def watched():
    """Return a kernel set with this plugin's warm-up, and what notes its calls."""
    forms = Forms()

    def wrap(name):
        original = getattr(ReferenceKernels, name)
        signature = inspect.signature(original)

        def call(self, *args, **kwargs):
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            forms.note(name, {key: value for key, value in bound.arguments.items() if key != "self"})
            return original(self, *args, **kwargs)

        return call

    names = [name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")]
    base = type("Watched", (ReferenceKernels,), {name: wrap(name) for name in names if name != "warm_up"})
    return extended(base)(), forms


class Operations(TorchDispatchMode):
    """Notes each operation of torch with the types that it is given."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add((str(func), *(each.dtype for each in args if isinstance(each, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def planned(case, kernels):
    registry = core_only()
    registry.add(mock_plugin("warm", tier="hardware", kernels=kernels))
    model, options = CASES[case]
    given = {"page_size": 64, "context_length": 256, "max_running_requests": 1, **options}
    budget = 2**24 if isinstance(model, kvdock.ModelSpec) else 2**29
    source = model if isinstance(model, kvdock.ModelSpec) else MODELS / f"{model}.json"
    return kvdock.plan(source, device=HERE, options=given, budget_bytes=budget, registry=registry)


@pytest.mark.parametrize("case", CASES)
def test_the_first_request_and_the_first_free_launch_nothing_new(case):
    kernels, forms = watched()
    plan = planned(case, kernels)
    with Operations() as operations:
        cache = kvdock.build(plan, debug=False)
    known, ran = set(forms.seen), set(operations.seen)
    assert "alloc_decode" in {method for method, _ in known} or plan.options.values.page_size == 1
    with Operations() as operations:
        cache.admit("first", 1)
        cache.prepare_states()
        cache.release("first")
        allocator = cache.token_to_kv_pool_allocator
        allocator.free(allocator.alloc(allocator.page_size))
    assert forms.seen == known
    assert operations.seen <= ran


def test_the_watch_sees_what_a_cache_that_was_not_warmed_runs_anew():
    kernels, forms = watched()
    plan = planned("pages", kernels)
    type(kernels).warm_up = lambda self, cache: None
    cache = kvdock.build(plan, debug=False)
    assert forms.seen == set()
    cache.admit("first", 1)
    cache.release("first")
    assert {"alloc_extend", "read_pages"} <= {method for method, _ in forms.seen}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_cache_is_empty_and_zero_afterwards(case, debug):
    cold = kvdock.build(planned(case, ReferenceKernels()), debug=debug)
    warm = kvdock.build(planned(case, watched()[0]), debug=debug)
    warm.check()
    assert warm.allocated_bytes() == cold.allocated_bytes() == warm.plan.total_bytes
    assert warm.token_to_kv_pool_allocator.available_size() == cold.token_to_kv_pool_allocator.available_size()
    for name, pool in warm.pools.items():
        for raw, fresh in zip(pool.storages(), cold.pools[name].storages(), strict=True):
            assert torch.equal(raw, fresh)
    first = [cache.admit("first", 3).tolist() for cache in (cold, warm)]
    assert first[0] == first[1]


def test_every_pool_that_is_written_token_by_token_was_written():
    kernels, forms = watched()
    kvdock.build(planned("sparse latents", kernels))
    methods = {method for method, _ in forms.seen}
    assert {"store", "gather", "move", "quantize_blocks", "dequantize_blocks"} <= methods


def test_layers_that_are_split_over_ranks_are_not_read():
    """Reads are collective: another rank may be at something else."""
    kernels, _ = watched()
    registry = core_only()
    registry.add(mock_plugin("warm", tier="hardware", kernels=kernels))
    options = {"page_size": 64, "context_length": 256, "layer_split": True, "role": "prefill", "kv_cache_dtype": "fp8"}
    plan = kvdock.plan(
        MODELS / "deepseek-v3.2.json",
        device=HERE,
        options=options,
        parallel={"tp_size": 2, "cp_size": 2},
        budget_bytes=2**29,
        registry=registry,
    )
    assert kvdock.build(plan).allocated_bytes() == plan.total_bytes


def test_a_cache_without_kv_is_warmed_as_well():
    registry = core_only()
    kernels, forms = watched()
    registry.add(mock_plugin("warm", tier="hardware", kernels=kernels))
    able = kvdock.DeviceInfo(
        device_type="cpu",
        name="able",
        total_bytes=2**40,
        free_before_load_bytes=2**40,
        free_bytes=2**40,
        capabilities=("skip_kv_cache:fa3",),
    )
    options = {
        "prefill_only_disable_kv_cache": True,
        "attention_backend": "fa3",
        "is_embedding": True,
        "prefix_cache": False,
        "context_length": 256,
    }
    plan = kvdock.plan(
        MODELS / "llama-3.1-8b.json", device=able, options=options, budget_bytes=2**27, registry=registry
    )
    cache = kvdock.build(plan)
    assert type(cache.token_to_kv_pool).__name__ == "NoOpPool"
    assert forms.seen


TRITON = """
import kvdock, torch
from kvdock.kernels.triton_set import TritonKernels
from kvdock.startup import core_only
from kvdock.testing.mocks import mock_plugin
from kvdock_rocm.kernels import extended

torch.set_num_threads(1)
params = kvdock.model.DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128)
layer = kvdock.LayerSpec(kind="dsa", params=params)
model = kvdock.ModelSpec(name="m", architecture="A", layers=(layer,), context_length=256, dtype="bfloat16")
here = kvdock.DeviceInfo(device_type="cpu", name="here", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)
registry = core_only()
registry.add(mock_plugin("warm", tier="hardware", kernels=extended(TritonKernels)()))
options = {"page_size": 64, "max_running_requests": 1, "kv_cache_dtype": "float8_e4m3fnuz"}
cache = kvdock.build(kvdock.plan(model, device=here, budget_bytes=2**22, options=options, registry=registry), debug=True)
cache.check()
print(sum(int(raw.count_nonzero()) for raw in cache.token_to_kv_pool.storages()), cache.admit("first", 2).tolist())
"""


def test_tritons_kernels_are_run_as_well():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", TRITON],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("0 [64, 65]\n", 0), done.stderr
