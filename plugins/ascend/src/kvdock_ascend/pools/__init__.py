"""Pools in the layouts that Ascend's kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvdock.pools.base import Pool

from kvdock_ascend.pools.attention import NpuDSAPool, NpuMHAPool, NpuMLAPool
from kvdock_ascend.pools.states import NpuStatePool

POOLS: Mapping[str, type[Pool]] = MappingProxyType(
    {"mha": NpuMHAPool, "mla": NpuMLAPool, "dsa": NpuDSAPool, "state": NpuStatePool}
)
"""Kind of a layer group → the pool that keeps it on these devices."""
