"""Rows of sparse latent attention as TensorRT-LLM's kernels read them: no scales between the columns."""

from __future__ import annotations

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
    if query.kind != "dsa" or query.kv_dtype not in E4M3 or not backends(query) & TRTLLM:
        return None
    if query.options.hisparse:
        return RawHiSparseDSAPool
    return RawLayerSplitDSAPool if query.options.layer_split else RawDSAPool


def backends(query: PoolQuery) -> frozenset[str | None]:
    """Return the backends of prefill and decode: those of sparse layers where they are given, else those of all."""
    options = query.options
    return frozenset(
        {
            options.sparse_prefill_backend or query.prefill_backend,
            options.sparse_decode_backend or query.decode_backend,
        }
    )
