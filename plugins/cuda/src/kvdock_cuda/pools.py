"""Rows of sparse latent attention as TensorRT-LLM's kernels read them: no scales between the columns."""

from __future__ import annotations

from kvdock.hardware import sparse_backends
from kvdock.pools import DSAPool, HiSparseDSAPool, LayerSplitDSAPool
from kvdock.pools.base import Pool
from kvdock.pools.dsa import E4M3, RowLayout
from kvdock.queries import PoolQuery

TRTLLM = frozenset({"trtllm", "trtllm_mla"})
"""Names of the backends that read raw rows, where engines name one for sparse layers or for all."""


class RawRows:
    """Latent and rope columns of 8 bits each, without scales in the row: 576 bytes instead of 656."""

    @classmethod
    def row_layout(cls, query: PoolQuery) -> RowLayout:
        """Return ``raw``, also for e4m3."""
        return "raw"


class RawDSAPool(RawRows, DSAPool):
    """Raw rows, and index keys."""


class RawHiSparseDSAPool(RawRows, HiSparseDSAPool):
    """Raw rows, mostly on the host, and index keys."""


class RawLayerSplitDSAPool(RawRows, LayerSplitDSAPool):
    """Raw rows and index keys of this rank's share of the layers."""


def pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Return the pool with raw rows where the core's would have scaled ones and TensorRT-LLM reads them."""
    backends = {name for _, name in sparse_backends(query.options)}
    if query.kind != "dsa" or query.kv_dtype not in E4M3 or not backends & TRTLLM:
        return None
    if query.options.hisparse:
        return RawHiSparseDSAPool
    return RawLayerSplitDSAPool if query.options.layer_split else RawDSAPool
