"""Devices by name: catalogue profiles, live devices, kernel sets, and whose name is whose."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, PluginError, nearest, nearest_model
from kvdock.hookspecs import TIERS
from kvdock.kernels.interface import Kernels
from kvdock.options import CacheOptions
from kvdock.plugins.answers import ask_all, first_claim, named, wrong
from kvdock.plugins.loading import Member, PluginWarning, Registry, shown

PROBES = ("core", "hardware")
"""Tiers that know live devices."""


def catalogue(registry: Registry) -> dict[str, list[tuple[str, DeviceInfo]]]:
    """Return every device profile by its bare name, with the plugins that bring it.

    Raises:
        PluginError: a plugin failed or answered something else than names and profiles.
    """
    profiles: dict[str, list[tuple[str, DeviceInfo]]] = {}
    for member, name, info in _profiles(registry):
        profiles.setdefault(name, []).append((member.name, info))
    return profiles


def _profiles(registry: Registry) -> list[tuple[Member, str, DeviceInfo]]:
    found = []
    for member, value in ask_all(registry, "device_catalogue", TIERS):
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise wrong(member, "device_catalogue", value, "a mapping of name to DeviceInfo")
        for name, info in value.items():
            if not isinstance(name, str) or not name or ":" in name:
                raise PluginError(
                    f"{named(member, 'device_catalogue')} lists a device called {shown(name)}; a name is text without ':'"
                )
            if not isinstance(info, DeviceInfo):
                raise wrong(member, f"device_catalogue[{shown(name)}]", info, "a DeviceInfo")
            found.append((member, name, info))
    return found


def owners_of(registry: Registry, device: DeviceInfo) -> tuple[Member, ...]:
    """Return the plugins that list a device: by its name, else by its device type."""
    profiles = _profiles(registry)
    by_name = [member for member, _, info in profiles if info.name == device.name]
    by_type = [member for member, _, info in profiles if info.device_type == device.device_type]
    unique = {member.name: member for member in by_name or by_type}
    return tuple(unique.values())


def probe(registry: Registry, plugin: str | None, selector: str = "") -> DeviceInfo | None:
    """Return the live device that `selector` names to a plugin; ``None``: no such device is here.

    Without a plugin every hardware plugin is asked for it.

    Raises:
        PlanError: no such plugin, or several hardware plugins find a device; says how to choose.
        PluginError: the plugin that was named failed.
    """
    if plugin is None:
        return _only(live_devices(registry, selector), selector)
    known = [member.name for member in registry.members]
    if plugin not in known:
        raise PlanError(
            f"no plugin is called {plugin!r}{nearest(plugin, known)} (loaded: {', '.join(known) or 'none'})"
        )
    return _probes(registry, PROBES, selector, {plugin}).get(plugin)


def live_devices(registry: Registry, selector: str = "") -> tuple[tuple[str, DeviceInfo], ...]:
    """Return the live device of each hardware plugin that finds one; the host is none.

    A probe that fails is a `PluginWarning` with the cause: nobody asked for that device by name. One that says why its
    devices are not here (a `PlanError`) is a warning only where no other plugin finds one.
    """
    found: dict[str, DeviceInfo] = {}
    absent: list[str] = []
    for member, _ in registry.hookimpls("probe_device", "hardware"):
        try:
            found |= _probes(registry, ("hardware",), selector, {member.name})
        except PlanError as error:
            absent.append(str(error))
        except PluginError as error:
            warnings.warn(f"{error}; its devices are left out", PluginWarning, stacklevel=2)
    for reason in absent if not found else ():
        warnings.warn(reason, PluginWarning, stacklevel=2)
    return tuple(found.items())


def _probes(registry: Registry, tiers: tuple[str, ...], selector: str, names: set[str]) -> dict[str, DeviceInfo]:
    found = {}
    for member, value in ask_all(registry, "probe_device", tiers, only=names, selector=selector):
        if value is None:
            continue
        if not isinstance(value, DeviceInfo):
            raise wrong(member, "probe_device", value, "a DeviceInfo")
        found[member.name] = value
    return found


def _only(found: tuple[tuple[str, DeviceInfo], ...], selector: str) -> DeviceInfo | None:
    if len(found) > 1:
        listed = ", ".join(f"{info.name} of {plugin}" for plugin, info in found)
        ways = " or ".join(f"device={plugin}:{selector or info.index or 0}" for plugin, info in found)
        raise PlanError(f"{len(found)} plugins find a live device ({listed}); choose with {ways}")
    return found[0][1] if found else None


def find_device(registry: Registry, selector: str) -> DeviceInfo:
    """Return the device called ``plugin:name`` or ``name``: a profile of the catalogue, else a live device.

    ``cpu``, ``cuda:0`` and ``npu:1`` (a plugin or a device type of the catalogue) are probed.

    Raises:
        PlanError: unknown (with the nearest name and the list), not here, or of two owners (with how to choose).
        PluginError: the plugin that was named failed.
    """
    if "," in selector:
        raise PlanError(
            f"device={selector!r} names several, and a plan is for one; give one of them, or compare them with "
            f"--compare device={selector}"
        )
    profiles = catalogue(registry)
    owner, colon, name = selector.partition(":")
    if not colon:
        owners = profiles.get(selector, [])
        if len(owners) > 1:
            ways = " or ".join(f"{plugin}:{selector}" for plugin, _ in owners)
            names = " and ".join(plugin for plugin, _ in owners)
            raise PlanError(f"device {selector!r} is a name of two plugins, {names}; choose with device={ways}")
        if owners:
            return owners[0][1]
    plugin = _owner(registry, profiles, owner, selector)
    mine = {known: info for known, pairs in profiles.items() for p, info in pairs if p == plugin}
    live = mine.get(name) or probe(registry, plugin, name)
    if live is None:
        listed = ", ".join(f"{plugin}:{known}" for known in sorted(mine)) or "no profile"
        raise PlanError(
            f"device {selector!r} is not here{nearest_model(name, mine)} (plugin {plugin!r} lists {listed})"
        )
    return live


def _owner(registry: Registry, profiles: dict[str, list[tuple[str, DeviceInfo]]], owner: str, selector: str) -> str:
    """Return the plugin that `owner` names, directly or as the device type of its profiles."""
    plugins = [member.name for tier in PROBES for member, _ in registry.hookimpls("probe_device", tier)]
    plugins += [plugin for pairs in profiles.values() for plugin, _ in pairs]
    if owner in plugins:
        return owner
    by_type = sorted({plugin for pairs in profiles.values() for plugin, info in pairs if info.device_type == owner})
    if len(by_type) == 1:
        return by_type[0]
    if by_type:
        ways = " or ".join(selector.replace(owner, plugin, 1) for plugin in by_type)
        raise PlanError(f"device type {owner!r} belongs to {' and '.join(by_type)}; choose with device={ways}")
    known = sorted({*profiles, *plugins})
    failed = [f"{p.name} is not loaded: {p.reason}" for p in registry.problems if p.name == owner]
    listed = ", ".join(known) or "none"
    why = f"; {failed[0]}" if failed else nearest_model(owner, known)
    raise PlanError(f"no device is called {selector!r}{why} (known: {listed}){_not_asked(registry, owner)}")


def _not_asked(registry: Registry, owner: str) -> str:
    """Return which other hardware is installed and not used, and so may list the device, with the reasons."""
    others = [p for p in registry.problems if p.tier == "hardware" and p.name != owner]
    listed = ", ".join(f"{p.name} ({p.origin}): {p.reason}" for p in others)
    return f"; not asked for its devices: {listed}" if others else ""


def kernels(registry: Registry, device: DeviceInfo, options: CacheOptions | None = None) -> Kernels | None:
    """Return the kernel set for a device; ``None`` leaves the reference kernels in place.

    Raises:
        PlanError: the plugin says that what it needs is not here.
        PluginError: two plugins of one tier give one, or an answer is no kernel set.
    """

    def check(member: Member, value: Any) -> str:
        if not isinstance(value, Kernels):
            raise wrong(member, "get_kernels", value, "a kernel set (kvdock.kernels.interface.Kernels)")
        return type(value).__name__

    subject = f"the kernels for device {device.name!r}"
    options = options or CacheOptions()
    prefer = options.prefer or ()
    claim, _ = first_claim(registry, "get_kernels", subject, check, prefer, device=device, options=options)
    found: Kernels | None = claim.value if claim else None
    return found
