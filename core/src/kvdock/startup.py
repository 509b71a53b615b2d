"""Which plugins take part: the built-in ones, and those that are installed and allowed."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from kvdock.builtin import BUILTINS
from kvdock.options import CacheOptions
from kvdock.plugins import discovery, loading
from kvdock.plugins.discovery import Candidate
from kvdock.plugins.loading import Registry

PLUGINS_VARIABLE = "KVDOCK_PLUGINS"
"""Environment variable with the names to allow, separated by commas; set but empty means core only."""


def allowed(options: CacheOptions, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the allow list: the option's, else the environment's, else ``None`` (all that are installed)."""
    if options.plugins is not None:
        return options.plugins
    if PLUGINS_VARIABLE not in environ:
        return None
    return tuple(name.strip() for name in environ[PLUGINS_VARIABLE].split(",") if name.strip())


def candidates() -> tuple[Candidate, ...]:
    """Return every installed plugin, from metadata alone."""
    return tuple(discovery.discover())


def installed(
    options: CacheOptions | None = None,
    *,
    hardware: Collection[str] | None = None,
    requested: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Registry:
    """Return a registry of the built-ins and the installed plugins that may matter.

    `hardware` names the hardware plugins to import (``None``: all); a plugin in `requested` must load.

    Raises:
        PluginError: a name in a list is not installed, or a requested plugin fails.
    """
    options = options or CacheOptions()
    return loading.load(
        candidates(),
        allow=allowed(options, os.environ if environ is None else environ),
        deny=options.no_plugins or (),
        hardware=hardware,
        requested=tuple(requested),
        strict=bool(options.strict),
        builtins=BUILTINS,
    )
