"""KV pools: who owns the tensors of a layer group, and how an engine reads and writes them."""

from kvdock.pools.base import BufferInfo, LayerTransfer, Pool, Region
from kvdock.pools.blocked import BlockMHAPool, BlockMLAPool, BlockPool
from kvdock.pools.dsa import DSAPool
from kvdock.pools.grouped import GroupedPool
from kvdock.pools.hisparse import HiSparseDSAPool
from kvdock.pools.hybrid import HybridLinearPool
from kvdock.pools.indexer import IndexerPool
from kvdock.pools.layer_split import LayerSplitDSAPool
from kvdock.pools.mha import MHAPool
from kvdock.pools.mla import MLAPool
from kvdock.pools.noop import NoOpPool
from kvdock.pools.routed import RoutedPool
from kvdock.pools.sliding import PureSlidingPool, SlidingPool
from kvdock.pools.sparse import SparsePool
from kvdock.pools.state import StatePool, StateStore

__all__ = [
    "BlockMHAPool",
    "BlockMLAPool",
    "BlockPool",
    "BufferInfo",
    "DSAPool",
    "GroupedPool",
    "HiSparseDSAPool",
    "HybridLinearPool",
    "IndexerPool",
    "LayerSplitDSAPool",
    "LayerTransfer",
    "MHAPool",
    "MLAPool",
    "NoOpPool",
    "Pool",
    "PureSlidingPool",
    "Region",
    "RoutedPool",
    "SlidingPool",
    "SparsePool",
    "StatePool",
    "StateStore",
]
