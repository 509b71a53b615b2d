"""The suite of plugins for each plugin of the site, and for one that is not installed."""

import msgspec
from kvdock.device import DeviceInfo
from kvdock.model import LayerSpec, SparseParams
from kvdock.testing.suites import SMALL_MODEL, Case, PluginSuite

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
    "Twins": "twins",
}

for _cls, _name in NAMES.items():
    globals()[f"Test{_cls}"] = type(f"Test{_cls}", (PluginSuite,), {"plugin": _name, "cases": (Case(device=DEVICE),)})


SPARSE = SparseParams(num_kv_heads=1, head_dim=16, v_head_dim=16, index_head_dim=8, index_value=False)


class TestUnmarked(PluginSuite):
    plugin = "unmarked"
    cases = (
        Case(
            device=DEVICE,
            model=msgspec.structs.replace(SMALL_MODEL, layers=(LayerSpec(kind="sparse", params=SPARSE),) * 2),
        ),
    )


class TestImperial(PluginSuite):
    plugin = "imperial"
    group = "kvdock.families"
    cases = (Case(),)
