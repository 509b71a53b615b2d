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
    """Return the allow list: the option's, else the environment's, else ``None`` (all that are installed).

    The option `no_plugins` narrows the environment's list.
    """
    if options.plugins is not None:
        return options.plugins
    if PLUGINS_VARIABLE not in environ:
        return None
    names = (name.strip() for name in environ[PLUGINS_VARIABLE].split(","))
    return tuple(name for name in names if name and name not in (options.no_plugins or ()))


def candidates() -> tuple[Candidate, ...]:
    """Return every installed plugin, from metadata alone."""
    return tuple(discovery.discover())


def check_names(options: CacheOptions, environ: Mapping[str, str] | None = None) -> None:
    """Check the names of plugins in the options and the environment, importing nothing.

    Raises:
        PluginError: nothing installed has a name, or it is asked for and left out at once.
    """
    allow = allowed(options, os.environ if environ is None else environ)
    lists = {"plugins": allow, "no_plugins": options.no_plugins}
    loading.check_names(candidates(), lists, [name for name, _ in BUILTINS])


def core_only() -> Registry:
    """Return a registry of the built-in plugins alone, whatever is installed."""
    registry = Registry()
    for name, plugin in BUILTINS:
        registry.add(plugin, name=name, tier="core")
    return registry


def installed(
    options: CacheOptions | None = None,
    *,
    hardware: Collection[str] | None = None,
    requested: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Registry:
    """Return a registry of the built-ins and the installed plugins that may matter.

    `hardware` names the hardware plugins to import (``None``: all) beside those that are allowed by name; a
    plugin that is allowed by name or in `requested` must load.

    Raises:
        PluginError: a name in a list is not installed, or a plugin that was asked for by name fails.
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
