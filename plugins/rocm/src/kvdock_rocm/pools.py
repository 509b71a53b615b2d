"""The core's pools in the encodings and rows that AMD's kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from kvdock import dtypes
from kvdock.hardware import sparse_backends
from kvdock.pools import DSAPool, HiSparseDSAPool, LayerSplitDSAPool, MHAPool, MLAPool
from kvdock.pools.base import Pool
from kvdock.pools.dsa import E4M3, RowLayout
from kvdock.queries import PoolQuery

from kvdock_rocm import settings
from kvdock_rocm.formats import native

if TYPE_CHECKING:
    from kvdock.layout import Buffer
    from kvdock.planned import Parts

RAW_ROWS = frozenset({"tilelang", "aiter"})
"""Backends of sparse latent attention that read rows without scales."""

NARROW = frozenset({"aiter"})
"""Prefill backends that count elements in 32 bits where pages are small."""

WIDE_PAGE = 128
"""Tokens of the smallest page from whose start `NARROW` backends count, instead of from the start of the layer."""

MAX_ELEMENTS = 2**31 - 1
"""The most elements of a layer's keys, or values, that 32 bits with a sign can count."""


class NativeFloats(Pool):
    """Declares and keeps 8-bit floats in the encoding of the device; they stay bytes in memory."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(native(query), parts)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the buffers of the pool, in the encoding of the device."""
        return super().buffers(native(query))


class RawRows:
    """Latent and rope columns of 8 bits each, without scales in the row, where the backend reads them so."""

    @classmethod
    def row_layout(cls, query: PoolQuery) -> RowLayout:
        """Return ``raw`` for `RAW_ROWS`, which is what there is where no backend is named; else as the core does."""
        return "raw" if reads_raw_rows(query) else DSAPool.row_layout(query)


class RocmMHAPool(NativeFloats, MHAPool):
    """Keys and values per head, no larger than what the prefill backend can address."""

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare keys and values; where offsets are narrow, with the largest tensor that they reach."""
        return tuple(
            msgspec.structs.replace(buffer, max_tensor_bytes=MAX_ELEMENTS * dtypes.find(buffer.dtype).bits // 8)
            if has_narrow_offsets(query)
            else buffer
            for buffer in super().buffers(query)
        )


class RocmMLAPool(NativeFloats, MLAPool):
    """Latent rows."""


class RocmDSAPool(RawRows, NativeFloats, DSAPool):
    """Latent rows and index keys."""


class RocmHiSparseDSAPool(RawRows, NativeFloats, HiSparseDSAPool):
    """Latent rows, mostly on the host, and index keys."""


class RocmLayerSplitDSAPool(RawRows, NativeFloats, LayerSplitDSAPool):
    """Latent rows and index keys of this rank's share of the layers."""


PLAIN: Mapping[str, type[Pool]] = {"mha": RocmMHAPool, "mla": RocmMLAPool}
"""Kind → the pool that keeps it in the encoding of the device."""


def pool_cls(query: PoolQuery) -> type[Pool] | None:
    """Return the pool where the core's would keep an encoding or rows that the device's kernels do not read."""
    if query.kind == "dsa":
        return _sparse_cls(query)
    if query.options.prefill_only_disable_kv_cache or not (_has_other_encoding(query) or _is_bounded(query)):
        return None
    return PLAIN.get(query.kind)


def _sparse_cls(query: PoolQuery) -> type[Pool] | None:
    if not (_has_other_encoding(query) or (query.kv_dtype in E4M3 and reads_raw_rows(query))):
        return None
    if query.options.hisparse:
        return RocmHiSparseDSAPool
    return RocmLayerSplitDSAPool if query.options.layer_split else RocmDSAPool


def _has_other_encoding(query: PoolQuery) -> bool:
    """Return whether the device reads another encoding than the short names of the options mean to the core."""
    chosen = native(query)
    is_other_index = query.kind == "dsa" and chosen.options.index_dtype != query.options.index_dtype
    return chosen.kv_dtype != query.kv_dtype or is_other_index


def _is_bounded(query: PoolQuery) -> bool:
    return query.kind == "mha" and not dtypes.find(query.kv_dtype).block and has_narrow_offsets(query)


def has_narrow_offsets(query: PoolQuery) -> bool:
    """Return whether the prefill backend reaches `MAX_ELEMENTS` of a layer's keys and no more."""
    is_narrow = query.prefill_backend in NARROW and query.space.page_size < WIDE_PAGE
    return is_narrow and not settings.of(query.options).wide_offsets


def reads_raw_rows(query: PoolQuery) -> bool:
    """Return whether a backend of `RAW_ROWS` reads the rows: one is named for prefill or decode, or none at all."""
    backends = {name for _, name in sparse_backends(query.options)}
    return backends == {None} or bool(backends & RAW_ROWS)
