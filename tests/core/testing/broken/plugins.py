"""The suite of plugins for each plugin of the site, and for one that is not installed."""

from kvdock.device import DeviceInfo
from kvdock.testing.suites import Case, PluginSuite

DEVICE = DeviceInfo(
    device_type="broken", name="broken-1", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24
)
NAMES = {
    "Sound": "sound",
    "Absent": "absent",
    "Loud": "Loud",
    "Heavy": "heavy",
    "Package": "package",
    "Old": "old",
    "Any": "any",
    "Misspelt": "misspelt",
    "WrongType": "wrong-type",
    "WrongKernels": "wrong-kernels",
    "Greedy": "greedy",
    "GreedyKernels": "greedy-kernels",
    "Nosy": "nosy",
    "Roaming": "roaming",
    "Writing": "writing",
    "Square": "square",
    "Fickle": "fickle",
    "Homeless": "homeless",
    "Unnamed": "unnamed",
    "Half": "half",
    "OtherArguments": "other-arguments",
    "Wide": "wide",
    "Hoarding": "hoarding",
}

for _cls, _name in NAMES.items():
    globals()[f"Test{_cls}"] = type(f"Test{_cls}", (PluginSuite,), {"plugin": _name, "cases": (Case(device=DEVICE),)})


class TestImperial(PluginSuite):
    plugin = "imperial"
    group = "kvdock.families"
    cases = (Case(),)
