"""What a user may say to this plugin: ``plugin_options={"cuda": {...}}``."""

from __future__ import annotations

import msgspec
from kvdock.hardware import plugin_settings
from kvdock.options import CacheOptions

PLUGIN = "cuda"
"""Name of the plugin, under which its options are given."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of this plugin.

    `backends` are attention backends of the engine that this plugin does not know. `side_stream` writes the values of
    small batches on a stream of their own while a graph is captured; by default where keys and values take a launch each.
    """

    backends: tuple[str, ...] = ()
    side_stream: bool | None = None


def of(options: CacheOptions) -> Settings:
    """Return what the options of a plan say to this plugin.

    Raises:
        PlanError: an option does not exist here, or does not take the value; says which would do.
    """
    return plugin_settings(options, PLUGIN, Settings, takes="backends, a list of names, and side_stream, true or false")
