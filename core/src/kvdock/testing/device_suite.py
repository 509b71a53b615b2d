"""What every plugin says about its devices, as tests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from kvdock.device import DeviceInfo
from kvdock.errors import KVDockError, PlanError
from kvdock.model import ModelSpec
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.plugins import resolve
from kvdock.plugins.loading import Registry
from kvdock.startup import core_only, installed
from kvdock.testing.asking import HEAVY, Watch, imported_with
from kvdock.testing.suite_base import SMALL_MODEL, Checks

HOST = "cpu"
"""Name and device type of the core's plugin for the host."""
NAME = re.compile(r"[a-z0-9][a-z0-9._+-]*")


class DeviceSuite(Checks):
    """The promises of a plugin's catalogue and of its probe; no device has to be there."""

    plugin: ClassVar[str]
    """Name of the plugin under test."""
    plugins: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Pairs of a name and a module or object with hooks, taken as hardware beside the core."""
    model: ClassVar[ModelSpec] = SMALL_MODEL
    """What is planned for each profile."""
    missing: ClassVar[str] = "9999"
    """A selector of a device that no machine has."""
    heavy: ClassVar[tuple[str, ...]] = HEAVY
    """Modules that an import of the plugin may not bring along; add the vendor's SDK."""

    @pytest.fixture
    def known(self) -> Watch:
        """Give a registry of the core and `plugins`."""
        registry: Registry = core_only()
        for name, plugin in self.plugins:
            registry.add(plugin, name=name, tier="hardware")
        return Watch(registry.members, self.plugin)

    @pytest.fixture
    def profiles(self, known: Watch) -> Mapping[str, DeviceInfo]:
        """Give the profiles of the plugin under test, by name."""
        found = {
            name: info
            for name, owners in resolve.catalogue(known).items()
            for owner, info in owners
            if owner == self.plugin
        }
        if not found:
            pytest.skip(f"{self.plugin} lists no profiles")
        return found

    def test_names_are_lower_case_and_the_profiles_own(self, profiles: Mapping[str, DeviceInfo]) -> None:
        """A profile is listed under its own name, in lower case, without ``:`` and spaces."""
        wrong = [f"{key!r} is {info.name!r}" for key, info in profiles.items() if key != info.name]
        wrong += [f"{key!r} is no lower-case word" for key in profiles if not NAME.fullmatch(key)]
        assert wrong == []

    def test_names_are_nobody_elses(self, profiles: Mapping[str, DeviceInfo]) -> None:
        """No other plugin that is installed lists a device under the same name: two owners make it unusable."""
        others = resolve.catalogue(installed())
        taken = {name: [owner for owner, _ in others.get(name, ()) if owner != self.plugin] for name in profiles}
        assert {name: owners for name, owners in taken.items() if owners} == {}

    def test_usable_bytes_are_some_and_not_more_than_there_are(self, profiles: Mapping[str, DeviceInfo]) -> None:
        """Of an idle device 0 < usable ≤ total, and as much is free now as before loading."""
        wrong = [
            f"{name}: {info.free_bytes} of {info.free_before_load_bytes} of {info.total_bytes}"
            for name, info in profiles.items()
            if not 0 < info.free_bytes == info.free_before_load_bytes <= info.total_bytes
        ]
        assert wrong == []

    def test_granularity_is_a_power_of_two(self, profiles: Mapping[str, DeviceInfo]) -> None:
        """Device allocators round to powers of two; another number is a unit mixed up."""
        wrong = {name: info.granularity_bytes for name, info in profiles.items() if not _is_power(info)}
        assert wrong == {}

    def test_sources_are_given(self, profiles: Mapping[str, DeviceInfo]) -> None:
        """Each profile says where its bytes come from."""
        assert [name for name, info in profiles.items() if not info.source.strip()] == []

    def test_profiles_are_no_live_devices(self, profiles: Mapping[str, DeviceInfo]) -> None:
        """A profile has no ordinal, and its capabilities are words, each once."""
        wrong = [f"{name}: index={info.index}" for name, info in profiles.items() if info.index is not None]
        wrong += [f"{name}: {info.capabilities}" for name, info in profiles.items() if not _are_words(info)]
        assert wrong == []

    def test_no_device_is_the_hosts(self, known: Watch, profiles: Mapping[str, DeviceInfo]) -> None:
        """No profile and no live device is of the type ``cpu``, which is the core's: nothing falls back to the host."""
        if self.plugin == HOST:
            pytest.skip("this is the host's own plugin")
        live = {}
        for selector in ("", "0"):
            with contextlib.suppress(PlanError):
                live[f"probe_device({selector!r})"] = resolve.probe(known, self.plugin, selector)
        found = [name for name, info in {**profiles, **live}.items() if info and info.device_type == HOST]
        assert found == [], f"{self.plugin} calls the host its own in {', '.join(found)}; name the vendor's device_type"

    def test_the_catalogue_is_the_same_each_time(self, known: Watch, profiles: Mapping[str, DeviceInfo]) -> None:
        """Listing reads nothing that changes: plans for a profile can be made again."""
        again = resolve.catalogue(known)
        assert {name: dict(again[name])[self.plugin] for name in profiles} == profiles

    def test_a_plan_can_be_made_for_each_profile(self, known: Watch, profiles: Mapping[str, DeviceInfo]) -> None:
        """A small model is planned for each, within its memory, and the profile is found by its names."""
        for name, info in profiles.items():
            assert resolve.find_device(known, f"{self.plugin}:{name}") == info
            plan = plan_from((self.model,), info, make_options({}), Parallelism(), known)
            assert 0 < plan.total_bytes <= info.free_bytes, name
            assert plan.max_running_requests > 0, name

    def test_importing_the_plugin_imports_no_torch(self, known: Watch) -> None:
        """Neither torch nor an SDK is imported with the module that the hooks are in."""
        found = imported_with(known.member.module, self.heavy)
        assert found == "", f"importing {known.member.module} imports {found}; import it inside the hook that needs it"

    def test_a_missing_device_is_one_line(self, known: Watch) -> None:
        """Asking for a device that is not here is an error of one line that names it, and nothing else."""
        with pytest.raises(PlanError) as caught:
            resolve.find_device(known, f"{self.plugin}:{self.missing}")
        text = str(caught.value)
        assert text.strip()
        assert "\n" not in text

    @pytest.mark.parametrize("selector", ["", "0", "1", "-1", "0x1", "٣", " ", "no such name"])
    def test_a_probe_finds_a_device_or_says_why_not(self, known: Watch, selector: str) -> None:
        """Whatever the selector: a live device, ``None``, or an error of one line; never a traceback."""
        try:
            info = resolve.probe(known, self.plugin, selector)
        except KVDockError as error:
            assert isinstance(error, PlanError), f"{error}; raise kvdock.PlanError for a device that is not here"
            assert "\n" not in str(error), f"{error} is not one line"
            return
        if info is not None:
            assert isinstance(info, DeviceInfo)
            assert info.index is not None, "a live device has its ordinal as index"
            assert 0 < info.free_bytes <= info.free_before_load_bytes <= info.total_bytes
            assert info.source.strip()
            assert _is_power(info)


def _is_power(info: DeviceInfo) -> bool:
    return info.granularity_bytes.bit_count() == 1


def _are_words(info: DeviceInfo) -> bool:
    words = info.capabilities
    return len(set(words)) == len(words) and all(word and not re.search(r"\s", word) for word in words)
