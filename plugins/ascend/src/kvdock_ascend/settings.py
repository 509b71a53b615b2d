"""What a user may say to this plugin: ``plugin_options={"ascend": {...}}``."""

from __future__ import annotations

import msgspec
from kvdock.hardware import plugin_settings
from kvdock.options import CacheOptions
from kvdock.queries import Query

PLUGIN = "ascend"
"""Name of the plugin, under which its options are given."""

FIA = "ascend_fia"
"""Attention backend of fused inference attention, which reads keys and values slot by slot."""

BACKENDS = frozenset({"ascend", FIA, "torch", "torch_native", "triton"})
"""Attention backends that engines have for these devices; `Settings.backends` adds to them."""

BACKEND_OPTIONS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

TRANSFER_ALIGN_BYTES = 2 * 2**20
"""Boundary on which transfer engines of these devices want a buffer to begin."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of this plugin.

    `fia` has keys and values read as ``[slots, 1, heads, dim]``, as `FIA` does for an engine that tells its attention
    in another way. `align_transfers` begins each buffer on a boundary of 2 MiB, which takes up to as much more.
    `backends` are attention backends of the engine that this plugin does not know.
    """

    fia: bool = False
    align_transfers: bool = False
    backends: tuple[str, ...] = ()


def of(options: CacheOptions) -> Settings:
    """Return what the options of a plan say to this plugin.

    Raises:
        PlanError: an option does not exist here, or does not take the value; says which would do.
    """
    return plugin_settings(
        options, PLUGIN, Settings, takes="fia and align_transfers, true or false, and backends, a list of names"
    )


def uses_fia(query: Query) -> bool:
    """Return whether an attention backend that reads slot by slot is asked for."""
    named = {getattr(query.options, name) for name in BACKEND_OPTIONS}
    return FIA in named or of(query.options).fia


def base_align(query: Query) -> int:
    """Return the boundary in bytes on which buffers begin."""
    return TRANSFER_ALIGN_BYTES if of(query.options).align_transfers else 1
