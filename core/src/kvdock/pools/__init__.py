"""KV pools: who owns the tensors of a layer group, and how an engine reads and writes them."""

from kvdock.pools.base import BufferInfo, LayerTransfer, Pool, Region
from kvdock.pools.grouped import GroupedPool
from kvdock.pools.indexer import IndexerPool
from kvdock.pools.mha import MHAPool
from kvdock.pools.mla import MLAPool
from kvdock.pools.noop import NoOpPool
from kvdock.pools.routed import RoutedPool
from kvdock.pools.sliding import PureSlidingPool, SlidingPool

__all__ = [
    "BufferInfo",
    "GroupedPool",
    "IndexerPool",
    "LayerTransfer",
    "MHAPool",
    "MLAPool",
    "NoOpPool",
    "Pool",
    "PureSlidingPool",
    "Region",
    "RoutedPool",
    "SlidingPool",
]
