"""KV pools: who owns the tensors of a layer group, and how an engine reads and writes them."""

from kvdock.pools.base import BufferInfo, Pool
from kvdock.pools.grouped import GroupedPool
from kvdock.pools.mha import MHAPool
from kvdock.pools.mla import MLAPool
from kvdock.pools.routed import RoutedPool
from kvdock.pools.sliding import SlidingPool

__all__ = ["BufferInfo", "GroupedPool", "MHAPool", "MLAPool", "Pool", "RoutedPool", "SlidingPool"]
