"""Plugins whose devices are described wrongly, each in one way."""

import itertools

import msgspec
from kvdock.device import DeviceInfo
from kvdock.testing.mocks import mock_plugin
from kvdock.testing.suites import DeviceSuite

GIB = 2**30
GOOD = DeviceInfo(
    device_type="broken",
    name="broken-1",
    total_bytes=GIB,
    free_before_load_bytes=GIB - 2**20,
    free_bytes=GIB - 2**20,
    granularity_bytes=512,
    source="made up",
)


def changed(**fields):
    return msgspec.structs.replace(GOOD, **fields)


def listing(*infos, **more):
    return mock_plugin("broken", "hardware", devices={info.name: info for info in infos}, **more)


def raising(error):
    def probe(selector):
        raise error

    return probe


def two_lines(selector):
    from kvdock import PlanError

    raise PlanError("no driver\nTraceback of the driver")


def live(**fields):
    return lambda selector: changed(index=0, **fields) if selector in ("", "0") else None


TURNS = itertools.count(2)
PLUGINS = {
    "Sound": listing(GOOD, live=live()),
    "Capitals": listing(changed(name="Broken One")),
    "OtherKey": mock_plugin("broken", "hardware", devices={"broken-2": GOOD}),
    "Taken": listing(changed(name="acme-1")),
    "Overfull": listing(changed(free_before_load_bytes=2 * GIB, free_bytes=GIB)),
    "Thirds": listing(changed(granularity_bytes=3)),
    "Unsourced": listing(changed(source=" ")),
    "Hosts": listing(changed(device_type="cpu"), live=lambda selector: None),
    "Live": listing(changed(index=0)),
    "Spaced": listing(changed(capabilities=("fp8 e4m3",))),
    "Growing": mock_plugin("broken", "hardware", devices=lambda: {GOOD.name: changed(total_bytes=next(TURNS) * GIB)}),
    "Tiny": listing(changed(total_bytes=2**12, free_before_load_bytes=2**12, free_bytes=2**12)),
    "Crashing": listing(GOOD, live=raising(RuntimeError("driver"))),
    "Verbose": listing(GOOD, live=two_lines),
    "Everywhere": listing(GOOD, live=lambda selector: changed(index=0)),
    "Nowhere": listing(GOOD, live=lambda selector: GOOD),
}
for _cls, _plugin in PLUGINS.items():
    globals()[f"Test{_cls}"] = type(
        f"Test{_cls}", (DeviceSuite,), {"plugin": "broken", "plugins": (("broken", _plugin),)}
    )


class TestHeavy(DeviceSuite):
    plugin = "heavy"

    @property
    def plugins(self):
        import broken_heavy

        return (("heavy", broken_heavy),)
