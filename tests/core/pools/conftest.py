"""Factories for pools on tensors of their own, without planner and builder."""

from types import SimpleNamespace

import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.layout import LayerGroup, SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, MLAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery, PoolQuery, RequestQuery

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.allocators import PagedAllocator, SWAAllocator  # noqa: E402
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.pools import MHAPool, MLAPool, RoutedPool, SlidingPool  # noqa: E402
from kvdock.pools.storage import allocate  # noqa: E402
from kvdock.requests import ReqToTokenPool  # noqa: E402

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=1, free_before_load_bytes=1, free_bytes=1)


def mha(heads=2, dim=8, v_dim=8, **more):
    return LayerSpec(kind="mha", params=MHAParams(num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim), **more)


def mla(lora=16, rope=8):
    return LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=lora, qk_rope_head_dim=rope))


def spaces(page_size, names=("full",)):
    return {name: Space(name=name, rule=SizeRule(), page_size=page_size) for name in names}


def common(dtype="bfloat16", tp=1, options=None):
    layer = mha()
    return {
        "model": ModelSpec(name="m", architecture="M", layers=(layer,), context_length=4096, dtype="bfloat16"),
        "options": options or CacheOptions(kv_cache_dtype=dtype),
        "parallel": Parallelism(tp_size=tp),
        "device": CPU,
    }


def query(layers, page_size=4, space="full", name="g", shared=(), groups=(), **fields):
    """A query for one group; `layers` maps global ids to specs."""
    pairs = tuple(sorted(layers.items()))
    group = LayerGroup(name=name, kind=pairs[0][1].kind, space=space, layers=pairs, shared=shared)
    return PoolQuery(
        kind=group.kind,
        group=group,
        spaces=spaces(page_size, ("full", "swa")),
        groups=groups or (group,),
        **common(**fields),
    )


def parts(cls, of, sizes, device="cpu", **fields):
    place = torch.device(device)
    known = of.spaces if isinstance(of.spaces, dict) else {space.name: space for space in of.spaces}
    tensors = allocate(cls.buffers(of), sizes, known, place)
    return Parts(tensors=tensors, kernels=ReferenceKernels(), device=place, sizes=sizes, **fields)


def pool(cls, of, tokens=12, device="cpu", **fields):
    return cls(of, parts(cls, of, {"full": tokens, "swa": tokens}, device, **fields))


def routed(cls, queries, sizes, device="cpu", **fields):
    """A pool that routes over one pool a query, all of whom know the same options."""
    groups = tuple(each.group for each in queries)
    pools = {}
    for each in queries:
        kind = MLAPool if each.kind == "mla" else MHAPool
        own = msgspec.structs.replace(each, groups=groups)
        pools[each.group.name] = kind(own, parts(kind, own, sizes, device, **fields))
    router = msgspec.structs.replace(queries[0], group=None, kind="router", groups=groups)
    return cls(router, parts(cls, router, sizes, device, pools=pools, **fields))


def swa_allocator(full, swa, page_size, device="cpu", debug=False):
    known = spaces(page_size, ("full", "swa"))
    sizes = {"full": full, "swa": swa}
    inner = {}
    for name, space in known.items():
        of = AllocatorQuery(spaces=(space,), **common())
        inner[name] = PagedAllocator(of, parts(PagedAllocator, of, sizes, device, debug=debug))
    of = AllocatorQuery(spaces=tuple(known.values()), **common())
    return SWAAllocator(of, parts(SWAAllocator, of, sizes, device, allocators=inner, debug=debug))


def sliding(full=16, swa=8, page_size=2, device="cpu", debug=False):
    """Layers 0 and 2 full, 1 and 3 sliding with other widths; every token of the full space is numbered."""
    allocator = swa_allocator(full, swa, page_size, device, debug)
    queries = [
        query({0: mha(2, 8, 8), 2: mha(2, 8, 8)}, page_size, "full", "full"),
        query({1: mha(4, 4, 2), 3: mha(4, 4, 2)}, page_size, "swa", "swa"),
    ]
    inner = {"full": allocator.full, "swa": allocator.swa}
    sizes = {"full": full, "swa": swa}
    return routed(SlidingPool, queries, sizes, device, allocator=allocator, allocators=inner, debug=debug)


def request_pool(rows=4, columns=32):
    known = {"requests": Space(name="requests", rule=SizeRule())}
    of = RequestQuery(spaces=known, groups=(), columns=columns, **common())
    return ReqToTokenPool(of, parts(ReqToTokenPool, of, {"requests": rows}))


@pytest.fixture(scope="session")
def make():
    """Specs, queries and pools: `make.pool(MHAPool, make.query({0: make.mha()}), tokens=12)`."""
    return SimpleNamespace(
        mha=mha,
        mla=mla,
        query=query,
        pool=pool,
        parts=parts,
        spaces=spaces,
        common=common,
        routed=routed,
        sliding=sliding,
        request_pool=request_pool,
        RoutedPool=RoutedPool,
    )


@pytest.fixture
def slots():
    """Turn numbers into slots."""
    return lambda *numbers, dtype=torch.int64: torch.tensor(numbers, dtype=dtype)
