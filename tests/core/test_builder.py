"""A plan becomes a live cache of exactly its bytes, or nothing at all."""

import gc
import subprocess
import sys

import kvdock
import msgspec
import pytest
from kvdock.allocators import PagedAllocator
from kvdock.builder import build
from kvdock.builtin import BUILTINS
from kvdock.device import DeviceInfo
from kvdock.errors import BuildError, SlotError
from kvdock.hookspecs import hookimpl
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.plugins.loading import Registry
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402

MIB = 2**20
ROOM = 16 * MIB
ACME = DeviceInfo(device_type="acme", name="acme-1", total_bytes=ROOM, free_before_load_bytes=ROOM, free_bytes=ROOM)


def mha(heads=2, dim=8, **more):
    return LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=dim), **more)


def mla():
    return LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=16, qk_rope_head_dim=8))


MODELS = {
    "mha": [mha()] * 3,
    "mla": [mla()] * 3,
    "two groups": [mha(), mla(), mha(4, 16)],
    "sliding": [mha(), mha(4, 4, window_tokens=15)] * 2,
    "all sliding": [mha(window_tokens=15)] * 2,
    "shared": [mha(), mha(shares_kv_with=0)],
}


def make_plan(layers="mha", budget=MIB, registry=None, device="cpu", parallel=None, drafts=(), **options):
    if registry is None:
        registry = core_only()
    specs = [MODELS[layers] if isinstance(layers, str) else layers, *drafts]
    models = tuple(
        ModelSpec(name="m", architecture="M", layers=tuple(spec), context_length=256, dtype="bfloat16")
        for spec in specs
    )
    if device == "cpu":
        device = msgspec.structs.replace(ACME, device_type="cpu", name="cpu")
    given = make_options({"max_running_requests": 4} | options)
    return plan_from(models, device, given, parallel or Parallelism(), registry, budget_bytes=budget)


def write(cache, request, tokens):
    """Admit a request of `tokens` tokens and return its slots."""
    (row,) = cache.req_to_token_pool.alloc([request])
    allocator = cache.token_to_kv_pool_allocator
    lens = torch.tensor([tokens])
    none = torch.zeros(1, dtype=torch.int64)
    slots = allocator.alloc_extend(none, [0], lens, [tokens], none - 1, tokens)
    cache.req_to_token_pool.write([row], [0], [tokens], slots)
    return slots


@pytest.mark.parametrize("layers", MODELS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_planned_bytes_are_allocated_bytes(layers, page_size):
    plan = make_plan(layers, page_size=page_size)
    cache = build(plan)
    assert cache.allocated_bytes() == plan.total_bytes <= MIB
    assert cache.host_bytes() == plan.host_bytes


@pytest.mark.parametrize("dtype", ["float32", "float16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_planned_bytes_are_allocated_bytes_on_each_rank_in_each_type(dtype, tp):
    plan = make_plan("sliding", parallel=Parallelism(tp_size=tp), kv_cache_dtype=dtype, page_size=16)
    assert build(plan).allocated_bytes() == plan.total_bytes


def test_each_tensor_is_rounded_to_the_granularity_of_the_device():
    device = msgspec.structs.replace(ACME, device_type="cpu", granularity_bytes=512)
    plan = make_plan(device=device)
    cache = build(plan)
    sizes = [raw.untyped_storage().nbytes() for raw in cache.token_to_kv_pool.storages()]
    assert all(size % 512 == 0 for size in sizes)
    assert cache.allocated_bytes() == plan.total_bytes <= MIB


def test_bytes_of_many_layers_stay_within_the_limit():
    """S-24: 28 layers in one group and a limit of bytes; the tensors are measured."""
    cache = build(make_plan([mha()] * 28, budget=3 * MIB))
    assert 3 * MIB - 28 * 2 * 32 - 64 < cache.allocated_bytes() <= 3 * MIB
    assert cache.token_to_kv_pool.mem_usage > 2.9 * MIB


def test_a_large_plan_builds_without_memory_on_meta():
    """S-23: pools whose tensors have more than 2^31 bytes and elements, built from plain numbers."""
    device = msgspec.structs.replace(ACME, total_bytes=2**37, free_before_load_bytes=2**37, free_bytes=2**37)
    plan = make_plan([mha(8, 128)] * 4, budget=2**36, device=device, page_size=64)
    cache = build(plan, device="meta")
    assert cache.allocated_bytes() == plan.total_bytes > 2**35
    keys = cache.token_to_kv_pool.get_key_buffer(3)
    assert keys.numel() > 2**31
    assert keys[-1].storage_offset() == (keys.shape[0] - 1) * 64 * 8 * 128 > 2**31


def test_the_parts_of_a_cache_have_the_sizes_of_the_plan():
    plan = make_plan("sliding", page_size=16)
    cache = build(plan)
    assert cache.token_to_kv_pool_allocator.size == plan.max_total_num_tokens == plan.spaces["full"]
    assert cache.token_to_kv_pool_allocator.available_size() == plan.spaces["swa"]
    assert cache.req_to_token_pool.size == plan.max_running_requests == 4
    assert cache.pools["swa"].get_key_buffer(1).shape[:2] == (plan.spaces["swa"] // 16 + 1, 16)
    assert cache.plan is plan


def test_every_part_has_the_same_options_whole():
    """P-10: one options object reaches each part of a composite."""
    cache = build(make_plan("sliding", page_size=16, kv_cache_dtype="fp8_e5m2", swa_full_tokens_ratio=0.5))
    options = cache.plan.options.values
    parts = [cache.token_to_kv_pool, *cache.pools.values(), cache.token_to_kv_pool_allocator, cache.req_to_token_pool]
    assert len(parts) == 5
    assert all(part.query.options is options for part in parts)


def test_memory_of_what_the_engine_sees_is_that_of_its_groups():
    """P-13: the breakdown of a composite sums to the memory that is measured."""
    pool = build(make_plan("sliding")).token_to_kv_pool
    assert set(pool.breakdown()) == {"full", "swa"}
    assert sum(pool.breakdown().values()) == pool.mem_usage > 0


def test_a_single_group_is_what_the_engine_sees():
    cache = build(make_plan("mha"))
    assert cache.token_to_kv_pool is cache.pools["full"]
    assert cache.drafts == {}


def test_a_draft_has_a_pool_of_its_own_and_shares_the_rest():
    plan = make_plan("mha", drafts=([mha(1, 4)],), speculative_algorithm="EAGLE", registry=speculating())
    cache = build(plan)
    draft = cache.drafts["draft"]
    assert draft is cache.pools["draft.full"] is not cache.token_to_kv_pool
    assert draft.parts.allocator is cache.token_to_kv_pool_allocator is cache.token_to_kv_pool.parts.allocator
    assert draft.get_key_buffer(0).shape[:2] == cache.token_to_kv_pool.get_key_buffer(0).shape[:2]
    assert cache.allocated_bytes() == plan.total_bytes


def speculating():
    """A registry whose request pool honours speculation."""

    class Requests(kvdock.builtin.ReqToTokenPool):
        features = frozenset({"speculation"})

    return registry_with("get_request_pool_cls", lambda query: Requests)


def registry_with(hook, answer, tier="hardware"):
    def method(self, query):
        return answer(query)

    plugin = type("Plugin", (), {"kvdock_contract": kvdock.CONTRACT, hook: hookimpl(method)})()
    registry = Registry()
    for name, builtin in BUILTINS:
        registry.add(builtin, name=name)
    registry.add(plugin, name="other", tier=tier)
    return registry


def test_a_size_other_than_the_plans_is_refused():
    """A-17: twice the planned tokens, set beside the plan; nothing is built."""
    plan = make_plan(page_size=16)
    tokens = plan.spaces["full"]
    doubled = msgspec.structs.replace(plan, spaces=plan.spaces | {"full": 2 * tokens})
    extra = tokens * (3 * 2 * 2 * 8 * 2) + tokens // 16 * 8
    match = rf"plan counts {plan.total_bytes:,} bytes of device memory, but its sizes take {plan.total_bytes + extra:,}"
    with pytest.raises(BuildError, match=match):
        build(doubled)


def test_a_total_other_than_that_of_the_sizes_is_refused():
    plan = make_plan()
    for field, word in (("total_bytes", "device"), ("host_bytes", "host")):
        wrong = msgspec.structs.replace(plan, **{field: getattr(plan, field) + 1})
        with pytest.raises(BuildError, match=f"bytes of {word} memory, but its sizes take"):
            build(wrong)


def test_a_class_with_a_size_of_its_own_is_refused():
    """A-17: a plugin's allocator that numbers slots which nobody allocated."""

    class Optimist(PagedAllocator):
        def __init__(self, query, parts):
            super().__init__(query, parts)
            self.size *= 2

    plan = make_plan(page_size=16, registry=registry_with("get_allocator_cls", lambda query: Optimist))
    tokens = plan.max_total_num_tokens
    with pytest.raises(BuildError, match=f"{2 * tokens} tokens were built but {tokens} planned"):
        build(plan)


def test_several_groups_need_a_pool_that_routes():
    plan = make_plan("two groups")
    alone = msgspec.structs.replace(plan, outline=msgspec.structs.replace(plan.outline, routers={}))
    with pytest.raises(BuildError, match="'target' has several layer groups and the plan names no pool that routes"):
        build(alone)


def test_without_torch_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BuildError, match=r"building needs torch .*pip install 'kvdock\[torch\]'"):
        build(make_plan())


@pytest.mark.parametrize(
    ("device", "match"),
    [
        (None, r"torch knows no device 'acme' here .*give device='cpu' \(--on-cpu\)"),
        ("acme", "torch knows no device 'acme' here"),
        ("cuda:0", r"the plan is for acme-1 \(acme\), not for 'cuda:0'; give device='cpu'"),
    ],
)
def test_a_device_that_is_not_the_plans_is_refused(device, match):
    with pytest.raises(BuildError, match=match):
        build(make_plan(device=ACME), device=device)


def test_a_device_that_is_not_here_is_refused():
    device = msgspec.structs.replace(ACME, device_type="xpu", name="some xpu", index=99)
    with pytest.raises(BuildError, match="the plan is for some xpu, and torch finds no 'xpu:99' here"):
        build(make_plan(device=device))


def test_a_plan_for_another_device_builds_on_the_host_when_asked():
    plan = make_plan(device=ACME)
    assert build(plan, device="cpu").allocated_bytes() == plan.total_bytes
    assert build(plan, device=torch.device("meta")).allocated_bytes() == plan.total_bytes


class MyKernels(ReferenceKernels):
    pass


def test_the_kernels_of_the_device_are_used_on_it_alone():
    class Plugin:
        kvdock_contract = kvdock.CONTRACT

        @hookimpl
        def get_kernels(self, device):
            return MyKernels()

    registry = registry_with("validate_plan", lambda query: None)
    registry.add(Plugin(), name="mine", tier="hardware")
    plan = make_plan(registry=registry)
    assert type(build(plan).token_to_kv_pool.parts.kernels) is MyKernels
    assert type(build(plan, device="meta").token_to_kv_pool.parts.kernels) is ReferenceKernels


def live_tensors():
    gc.collect()
    return {id(found) for found in gc.get_objects() if type(found) is torch.Tensor}


def test_memory_that_is_not_there_is_an_error_and_nothing_stays():
    device = msgspec.structs.replace(ACME, total_bytes=2**62, free_before_load_bytes=2**62, free_bytes=2**62)
    plan = make_plan([mha(64, 2**20), mha()], budget=2**60, device=device, max_total_tokens=10**7)
    before = live_tensors()
    with pytest.raises(
        BuildError, match=r"buffer 'k' of full asked for [\d,]+ bytes on cpu .* plan for a smaller"
    ) as error:
        build(plan, device="cpu")
    assert live_tensors() <= before
    assert error.value.__traceback__ is not None


def test_a_class_that_fails_leaves_nothing():
    class Fails(PagedAllocator):
        def __init__(self, query, parts):
            super().__init__(query, parts)
            raise ValueError("a bug")

    plan = make_plan(page_size=16, registry=registry_with("get_allocator_cls", lambda query: Fails))
    before = live_tensors()
    with pytest.raises(ValueError, match="a bug"):
        build(plan)
    assert live_tensors() <= before


@pytest.mark.parametrize(("value", "debug"), [("1", True), ("0", False), ("", False)])
def test_debug_is_read_from_the_environment(monkeypatch, value, debug):
    monkeypatch.setenv("KVDOCK_DEBUG", value)
    plan = make_plan()
    assert build(plan).token_to_kv_pool.parts.debug is debug
    assert build(plan, debug=not debug).token_to_kv_pool.parts.debug is not debug


def test_release_frees_slots_and_row_and_may_be_called_twice():
    cache = build(make_plan(page_size=16), debug=True)
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    before = allocator.available_size()
    slots = write(cache, "a", 40)
    write(cache, "b", 5)
    cache.check(held=torch.cat([slots, table.req_to_token[table.row_of("b"), :5].long()]))
    cache.release("a")
    assert allocator.available_size() == before - 16
    assert table.row_of("a") is None
    cache.release("a")
    cache.release("never seen")
    cache.release("b")
    assert allocator.available_size() == before
    cache.check(held=torch.zeros(0, dtype=torch.int64))


def test_release_leaves_what_somebody_else_keeps():
    cache = build(make_plan(page_size=16), debug=True)
    slots = write(cache, "a", 40)
    cache.release("a", kept=32)
    cache.check(held=slots[:32])


def test_release_refuses_to_keep_more_than_there_is():
    cache = build(make_plan(page_size=16))
    write(cache, "a", 40)
    with pytest.raises(SlotError, match="request 'a' wrote 40 tokens; kept=48 of them cannot be meant"):
        cache.release("a", kept=48)
    assert cache.req_to_token_pool.row_of("a") is not None


def test_a_request_without_tokens_is_released():
    cache = build(make_plan())
    cache.req_to_token_pool.alloc(["a"])
    cache.release("a")
    assert cache.req_to_token_pool.available_size() == 4


@pytest.mark.parametrize("ends", [(), (7,), (16,), (8, 20), (3, 5, 9, 30), (40,)])
def test_release_knows_which_sliding_slots_went_back_before(ends):
    cache = build(make_plan("sliding", page_size=4), debug=True)
    allocator = cache.token_to_kv_pool_allocator
    full, swa = allocator.full_available_size(), allocator.swa_available_size()
    slots = write(cache, "a", 40)
    for end in ends:
        cache.evict(["a"], [end])
    whole = max(ends, default=0) // 4 * 4
    assert allocator.swa_available_size() == swa - 40 + whole
    assert allocator.full_available_size() == full - 40
    assert cache.token_to_kv_pool.translate_loc_from_full_to_swa(slots).eq(0).sum() == whole
    cache.release("a")
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (full, swa)
    cache.check()


def test_what_was_evicted_is_forgotten_with_the_request():
    cache = build(make_plan("sliding", page_size=4), debug=True)
    before = cache.token_to_kv_pool_allocator.available_size()
    write(cache, "a", 40)
    cache.evict(["a"], [20])
    cache.release("a")
    write(cache, "a", 40)
    cache.release("a")
    assert cache.token_to_kv_pool_allocator.available_size() == before
    write(cache, "a", 40)
    cache.evict(["a"], [20])
    cache.clear()
    write(cache, "a", 40)
    cache.release("a")
    assert cache.token_to_kv_pool_allocator.available_size() == before


def test_a_row_that_was_freed_past_the_cache_starts_again():
    cache = build(make_plan("sliding", page_size=4))
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    before = allocator.available_size()
    slots = write(cache, "a", 40)
    cache.evict(["a"], [20])
    allocator.free(slots)
    table.free("a")
    write(cache, "a", 40)
    cache.release("a")
    assert allocator.available_size() == before


def test_evicting_what_was_not_written_is_refused():
    cache = build(make_plan("sliding", page_size=4))
    before = cache.token_to_kv_pool_allocator.swa_available_size()
    write(cache, "a", 8)
    with pytest.raises(SlotError, match="request 'a' wrote 8 tokens; its tokens before 12 cannot all"):
        cache.evict(["a"], [12])
    with pytest.raises(SlotError, match="request 'b' has no row"):
        cache.evict(["a", "b"], [4, 4])
    assert cache.token_to_kv_pool_allocator.swa_available_size() == before - 8


def test_without_a_sliding_space_nothing_is_evicted():
    cache = build(make_plan("mha", page_size=4))
    write(cache, "a", 8)
    before = cache.token_to_kv_pool_allocator.available_size()
    cache.evict(["a"], [8])
    assert cache.token_to_kv_pool_allocator.available_size() == before


def test_clear_gives_back_everything_and_zeroes_the_pools():
    cache = build(make_plan("sliding", page_size=4))
    before = cache.token_to_kv_pool_allocator.available_size()
    slots = write(cache, "a", 8)
    ones = torch.ones(8, 2, 8, dtype=torch.bfloat16)
    cache.token_to_kv_pool.set_kv_buffer(0, slots, ones, ones)
    cache.clear()
    assert cache.token_to_kv_pool_allocator.available_size() == before
    assert cache.req_to_token_pool.available_size() == 4
    assert not cache.token_to_kv_pool.get_key_buffer(0).any()
    cache.check()


def test_a_rank_without_kv_says_so():
    plan = make_plan()
    outline = msgspec.structs.replace(plan.outline, pools=(), allocators=())
    rest = sum(b.nbytes for b in plan.tables if b.owner == "request pool" and b.memory == "device")
    cache = build(msgspec.structs.replace(plan, outline=outline, total_bytes=rest))
    with pytest.raises(BuildError, match="no layer of this rank keeps KV"):
        cache.token_to_kv_pool
    with pytest.raises(BuildError, match="there is no allocator"):
        cache.token_to_kv_pool_allocator
    cache.req_to_token_pool.alloc(["a"])
    cache.release("a")
    cache.check()


RANK = """
import sys
import kvdock
from torch import distributed

meet, rank, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
layer = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8))
model = kvdock.ModelSpec(name="m", architecture="M", layers=(layer,), context_length=256, dtype="bfloat16")
plan = kvdock.plan(model, budget_bytes=budget, options={"plugins": (), "max_running_requests": 4, "page_size": 16})
try:
    kvdock.build(plan, group=distributed.group.WORLD)
    print(plan.max_total_num_tokens, "built")
except kvdock.BuildError as error:
    print(plan.max_total_num_tokens, error)
finally:
    distributed.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("budgets", [(MIB, MIB), (MIB, MIB // 2)], ids=["agree", "differ"])
def test_ranks_of_a_group_must_have_planned_the_same(tmp_path, budgets):
    commands = [
        [sys.executable, "-c", RANK, str(tmp_path / "meet"), str(rank), str(budget)]
        for rank, budget in enumerate(budgets)
    ]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    lines = [rank.communicate(timeout=120)[0] for rank in ranks]
    tokens, found = zip(*(line.split(maxsplit=1) for line in lines), strict=True)
    if budgets[0] == budgets[1]:
        assert [text.strip() for text in found] == ["built", "built"]
    else:
        expected = f"the ranks planned {tokens[1]} to {tokens[0]} tokens and 4 to 4 requests; plan all of them for cap_"
        assert all(text.startswith(expected) for text in found)
