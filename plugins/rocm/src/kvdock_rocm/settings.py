"""What a user may say to this plugin: ``plugin_options={"rocm": {...}}``."""

from __future__ import annotations

import msgspec
from kvdock.hardware import plugin_settings
from kvdock.options import CacheOptions

PLUGIN = "rocm"
"""Name of the plugin, under which its options are given."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of this plugin.

    `backends` are attention backends of the engine that this plugin does not know. `wide_offsets` says that aiter's
    prefill kernels here find elements beyond 2^31 in small pages, so keys and values may grow past that. `foreign_floats`
    says that the engine's kernels convert encodings of 8 bits that the architecture does not read.
    """

    backends: tuple[str, ...] = ()
    wide_offsets: bool = False
    foreign_floats: bool = False


def of(options: CacheOptions) -> Settings:
    """Return what the options of a plan say to this plugin.

    Raises:
        PlanError: an option does not exist here, or does not take the value; says which would do.
    """
    return plugin_settings(
        options, PLUGIN, Settings, takes="backends, a list of names, and wide_offsets and foreign_floats, true or false"
    )
