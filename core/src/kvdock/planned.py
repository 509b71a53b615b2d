"""What pool, allocator and request-pool classes have in common: they declare themselves before they exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from kvdock.layout import Buffer

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.kernels.interface import Kernels
    from kvdock.pools.base import Pool
    from kvdock.pools.storage import Tensors
    from kvdock.requests.base import RequestPool
    from kvdock.unified.memory import UnifiedMemory


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What `build` hands to a class that it constructs.

    `tensors` are the class's own, by buffer name; `sizes` the usable slots of each space; `pools` the
    pools of the groups (for a pool that routes), `allocators` the inner ones (for a composite),
    `allocator` and `request_pool` those that the engine uses (for pools that read their maps). An inner
    allocator whose slots are not those of the request table gets no `request_pool`. `group` is the
    `torch.distributed` process group that `build` was given, for pools whose ranks read from each other; `memory` the
    byte buffer that spaces share in unified memory.
    """

    tensors: Tensors
    kernels: Kernels
    device: torch.device
    sizes: Mapping[str, int]
    debug: bool = False
    pools: Mapping[str, Pool] = {}
    allocators: Mapping[str, Allocator] = {}
    allocator: Allocator | None = None
    request_pool: RequestPool | None = None
    group: Any = None
    memory: UnifiedMemory | None = None


class Planned:
    """A class that a plan can choose: it says where it runs, what it honours and what it allocates.

    `device_types` are the devices it runs on (``None``: any that torch serves); `features` what a query
    may ask of it; `options` the options that shape its buffers or behaviour. An option that the user set
    and that nothing in the plan lists is an error of the plan.
    """

    device_types: ClassVar[frozenset[str] | None] = None
    features: ClassVar[frozenset[str]] = frozenset()
    options: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def buffers(cls, query: Any) -> tuple[Buffer, ...]:
        """Declare every tensor that an instance owns. Imports no torch; names are unique in the answer."""
        return ()
