"""What runs inside a graph: it neither waits for the device nor takes memory that grows with the pool."""

import gc

import kvdock
import pytest
from kvdock.model import DSAParams, MLAParams
from kvdock.planner import plan_from
from kvdock.startup import core_only
from kvdock_cuda import hooks

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

MHA = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=16, v_head_dim=16))
SLIDING = kvdock.LayerSpec(kind="mha", params=MHA.params, window_tokens=127)
MLA = kvdock.LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=64, qk_rope_head_dim=16))
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128))
WAITS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
)
BATCH = 8
"""Requests of a step; each takes one token, or a page and a token."""


class Captured(TorchDispatchMode):
    """Refuses what a capture refuses, and every tensor of more than `most` bytes."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket in WAITS:
            raise AssertionError(f"{func} waits for the device")
        given = {id(tensor.untyped_storage()) for tensor in tensors_of(args) + tensors_of(list(kwargs.values()))}
        found = func(*args, **kwargs)
        for tensor in tensors_of([found]):
            if tensor.nbytes > self.most and not tensor._is_view() and id(tensor.untyped_storage()) not in given:
                raise AssertionError(f"{func} takes {tensor.nbytes} bytes")
            if any(each.device.type != tensor.device.type for each in tensors_of(args)) and tensor.is_cpu:
                raise AssertionError(f"{func} copies to the host")
        return found


def tensors_of(values):
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


def cache_of(layers, device, budget=2**25, **options):
    registry = core_only()
    registry.add(hooks, name="cuda", tier="hardware")
    model = kvdock.ModelSpec(name="m", architecture="A", layers=layers, context_length=4096, dtype="bfloat16")
    given = kvdock.CacheOptions(**{"page_size": 64, "max_running_requests": BATCH, **options})
    profile = hooks.device_catalogue()["b200"]
    plan = plan_from((model,), profile, given, kvdock.Parallelism(), registry, budget_bytes=budget)
    return kvdock.build(plan, device=device)


def step(cache, device):
    """Take slots, write, move and give back, as a step of `BATCH` requests does."""
    allocator, pool, table = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool, cache.req_to_token_pool
    lens = torch.full((BATCH,), 65, dtype=torch.int64, device=device)
    none = torch.zeros_like(lens)
    slots = allocator.alloc_extend(none, [0] * BATCH, lens, [65] * BATCH, none - 1, 65 * BATCH)
    table.write(range(1, BATCH + 1), [0] * BATCH, [65] * BATCH, slots)
    last = slots.view(BATCH, 65)[:, -1]
    new = allocator.alloc_decode(lens + 1, [66] * BATCH, last)
    for layer_id in pool.layer_ids:
        write(pool, layer_id, new, device)
    pool.move_kv_cache(new, last)
    allocator.free_rows(table.req_to_token, list(range(1, BATCH + 1)), [0] * BATCH, [65] * BATCH)


def write(pool, layer_id, slots, device):
    def values(*shape):
        return torch.zeros(len(slots), *shape, dtype=torch.bfloat16, device=device)

    params = dict(enumerate(pool.query.model.layers))[layer_id].params
    if isinstance(params, kvdock.MHAParams):
        heads = values(params.num_kv_heads, params.head_dim)
        pool.set_kv_buffer(layer_id, slots, heads, heads)
    else:
        pool.set_mla_kv_buffer(layer_id, slots, values(1, params.kv_lora_rank), values(1, params.qk_rope_head_dim))


CASES = {
    "mha": ((MHA, MHA), {}),
    "mha fp8": ((MHA, MHA), {"kv_cache_dtype": "fp8_e4m3"}),
    "mha nvfp4": ((MHA, MHA), {"kv_cache_dtype": "nvfp4"}),
    "mla": ((MLA, MLA), {}),
    "raw dsa": ((DSA, DSA), {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "trtllm"}),
    "dsa": ((DSA, DSA), {"kv_cache_dtype": "fp8_e4m3"}),
    "sliding": ((MHA, SLIDING), {"prefix_cache": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_neither_waits_nor_takes_memory_of_the_pool(case):
    layers, options = CASES[case]
    cache = cache_of(layers, "meta", **options)
    rows = [buffer.nbytes // buffer.tensors for buffer in cache.plan.buffers if buffer.is_kv and buffer.space]
    cache.req_to_token_pool.alloc(list(range(BATCH)))
    with Captured(most=min(rows) // 2):
        step(cache, "meta")


def test_the_double_catches_a_wait_and_a_copy_of_a_pool():
    pool = torch.zeros(1000, device="meta")
    for careless in (lambda: pool.clone(), lambda: pool.nonzero(), lambda: pool[0].item(), lambda: pool.unique()):
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), Captured(most=100):
            careless()
    with Captured(most=100):
        pool[:4].clone()
        pool.zero_()


@pytest.mark.device
@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("case", ["mha", "mha fp8", "mla", "raw dsa"])
def test_writes_and_moves_are_captured_and_replayed(case, side_stream):
    """A graph that writes to slots named by a tensor writes where that tensor points when it is replayed."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("no CUDA device is here")
    layers, options = CASES[case]
    cache = cache_of(layers, "cuda", plugin_options={"cuda": {"side_stream": side_stream}}, **options)
    pool = cache.token_to_kv_pool
    slots, targets = torch.arange(64, 72, device="cuda"), torch.arange(128, 136, device="cuda")

    def work():
        for layer_id in pool.layer_ids:
            write(pool, layer_id, slots, "cuda")
        pool.move_kv_cache(targets, slots)

    work()  # warmed up: Triton compiles, and the stream is made
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    held = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        work()
    assert torch.cuda.memory_allocated() - held < 2**20
    for part in cache.pools.values():
        for raw in part.storages():
            raw.fill_(1)
    slots += 8
    graph.replay()
    torch.cuda.synchronize()
    for layer_id in pool.layer_ids:
        for page, first, expected in ((1, 0, 1), (1, 8, 0), (2, 0, 0), (2, 8, 1)):
            rows = pool.get_key_buffer(layer_id)[page, first : first + 8].contiguous().view(torch.uint8)
            assert (rows == expected).all()  # zeros were written over ones, to the slots and to the targets alone
    del graph
    gc.collect()
