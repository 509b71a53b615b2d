"""Allocators and request tables of kvdock on tensors of their own, without planner and builder."""

from __future__ import annotations

import torch
from kvdock.allocators import PagedAllocator, SWAAllocator, TokenAllocator
from kvdock.device import DeviceInfo
from kvdock.kernels.reference import ReferenceKernels
from kvdock.layout import SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.planned import Parts
from kvdock.pools.storage import allocate
from kvdock.queries import AllocatorQuery, RequestQuery
from kvdock.requests import ReqToTokenPool

CPU = torch.device("cpu")


def common() -> dict:
    """Return the fields that every query has; the model does not matter here."""
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128))
    return {
        "model": ModelSpec(name="m", architecture="M", layers=(layer,), context_length=4096, dtype="bfloat16"),
        "options": CacheOptions(),
        "parallel": Parallelism(),
        "device": DeviceInfo(device_type="cpu", name="cpu", total_bytes=1, free_before_load_bytes=1, free_bytes=1),
    }


def make_parts(buffers, sizes: dict[str, int], spaces: dict[str, Space], **more) -> Parts:
    tensors = allocate(buffers, sizes, spaces, CPU)
    return Parts(tensors=tensors, kernels=ReferenceKernels(), device=CPU, sizes=sizes, **more)


def build(size: int, page_size: int, space: str = "full") -> PagedAllocator:
    spaces = {space: Space(name=space, rule=SizeRule(), page_size=page_size)}
    cls = TokenAllocator if page_size == 1 else PagedAllocator
    query = AllocatorQuery(spaces=tuple(spaces.values()), **common())
    return cls(query, make_parts(cls.buffers(query), {space: size}, spaces))


def build_sliding(size: int, page_size: int) -> SWAAllocator:
    names = ("full", "swa")
    spaces = {name: Space(name=name, rule=SizeRule(), page_size=page_size) for name in names}
    inner = {name: build(size, page_size, name) for name in names}
    query = AllocatorQuery(spaces=tuple(spaces.values()), inner={n: type(a) for n, a in inner.items()}, **common())
    sizes = dict.fromkeys(names, size)
    return SWAAllocator(query, make_parts(SWAAllocator.buffers(query), sizes, spaces, allocators=inner))


def build_requests(rows: int, columns: int) -> ReqToTokenPool:
    spaces = {"requests": Space(name="requests", rule=SizeRule(), issued_by="request_pool")}
    query = RequestQuery(spaces=spaces, groups=(), columns=columns, **common())
    return ReqToTokenPool(query, make_parts(ReqToTokenPool.buffers(query), {"requests": rows}, spaces))
