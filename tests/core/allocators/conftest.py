"""Factories for allocators on tensors of their own, without planner and builder."""

from types import SimpleNamespace

import pytest
from kvdock.device import DeviceInfo
from kvdock.layout import SizeRule, Space, Unit
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.allocators import (  # noqa: E402
    PagedAllocator,
    PureSWAAllocator,
    PureSWATokenAllocator,
    SWAAllocator,
    TokenAllocator,
)
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402


class StandInTensors:
    """Allocates declared buffers by their rows, shape and storage dtype."""

    def __init__(self, buffers, units, device):
        self._tensors = {
            b.name: torch.zeros(
                (b.rows(0 if b.space is None else units(b)), *b.shape),
                dtype=getattr(torch, b.dtype),
                device="cpu" if b.memory == "host" else device,
            )
            for b in buffers
        }
        self.nbytes = sum(t.numel() * t.element_size() for t in self._tensors.values())

    def rows(self, name, layer_id=None):
        return self._tensors[name]


def _query(spaces, inner):
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
    return AllocatorQuery(
        model=ModelSpec(name="m", architecture="M", layers=(layer,), context_length=4096, dtype="bfloat16"),
        options=CacheOptions(),
        parallel=Parallelism(),
        device=DeviceInfo(device_type="cpu", name="cpu", total_bytes=1, free_before_load_bytes=1, free_bytes=1),
        spaces=spaces,
        inner=inner,
    )


def _build(cls, sizes, page_size, device, debug, allocators=None, planned=None):
    spaces = tuple(Space(name=name, rule=SizeRule(), page_size=page_size) for name in sizes)
    query = _query(spaces, {name: type(inner) for name, inner in (allocators or {}).items()})

    def units(buffer):
        size = (planned or sizes)[buffer.space]
        return size // page_size if buffer.unit is Unit.PAGE else size

    parts = Parts(
        tensors=StandInTensors(cls.buffers(query), units, device),
        kernels=ReferenceKernels(),
        device=torch.device(device),
        sizes=sizes,
        debug=debug,
        allocators=allocators or {},
    )
    return cls(query, parts)


def single(size, page_size=1, device="cpu", debug=False, space="full", cls=None, planned=None):
    chosen = cls or (TokenAllocator if page_size == 1 else PagedAllocator)
    return _build(chosen, {space: size}, page_size, device, debug, planned=planned)


def sliding(full, swa, page_size=1, device="cpu", debug=False, planned=None, inner=None):
    """`inner` names the classes of the sides, where they are not core's own."""
    classes, sizes = inner or {}, {"full": full, "swa": swa}
    sides = {name: single(size, page_size, device, debug, name, classes.get(name)) for name, size in sizes.items()}
    return _build(SWAAllocator, sizes, page_size, device, debug, sides, planned)


def pure(size, page_size=1, device="cpu", debug=False, cls=None):
    chosen = cls or (PureSWATokenAllocator if page_size == 1 else PureSWAAllocator)
    return single(size, page_size, device, debug, "swa", chosen)


@pytest.fixture(scope="session")
def make():
    """`make.single(size, page_size, …)`, `make.swa(full, swa, page_size, …)` and `make.pure(size, page_size, …)`."""
    return SimpleNamespace(single=single, swa=sliding, pure=pure, query=_query)
