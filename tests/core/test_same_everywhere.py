"""What every plugin and every rank has in common: the user's limits, and one reading of the device."""

import importlib

import kvdock
import msgspec
import pytest
from kvdock.device import DeviceInfo
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.startup import core_only
from kvdock.testing.mocks import MOCK_DEVICE, add_mocks, ring_model

GIB = 2**30
CPU = DeviceInfo(device_type="cpu", name="small", total_bytes=GIB, free_before_load_bytes=GIB, free_bytes=GIB)


def heads(layers=2, **fields):
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=16, v_head_dim=16))
    return ModelSpec(
        name="m", architecture="A", layers=(layer,) * layers, context_length=256, dtype="bfloat16", **fields
    )


def core():
    return core_only(), CPU, heads()


def mock_hardware():
    return add_mocks(core_only(), family=False, variant=False), MOCK_DEVICE, heads()


def mock_family():
    return add_mocks(core_only(), hardware=False, variant=False), CPU, ring_model()


def mock_variant():
    return add_mocks(core_only()), MOCK_DEVICE, ring_model()


def acme():
    hooks = importlib.import_module("kvdock_acme.hooks")
    registry = core_only()
    registry.add(hooks, name="acme", tier="hardware")
    return registry, hooks.device_catalogue()["acme-1"], heads()


PLUGINS = (core, mock_hardware, mock_family, mock_variant, acme)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_one_request_is_one_request_under_every_plugin(plugin):
    # U-06
    registry, device, model = plugin()
    plan = kvdock.plan(model, device=device, options={"max_running_requests": 1}, registry=registry)
    assert (plan.max_running_requests, plan.spaces["requests"]) == (1, 1)


def test_a_default_of_a_plugin_does_not_replace_the_users_limit(mock_plugin):
    # U-06
    registry = core_only()
    registry.add(mock_plugin("hw", tier="hardware", defaults={"max_running_requests": 64}))
    assert kvdock.plan(heads(), device=CPU, registry=registry).max_running_requests == 64
    asked = {"max_running_requests": 1}
    assert kvdock.plan(heads(), device=CPU, options=asked, registry=registry).max_running_requests == 1


class Falling:
    """A device whose free memory is 1 GiB less each time that it is read, as when a peer builds its pool."""

    def __init__(self, mock_plugin):
        self.reads = 0
        self.registry = core_only()
        self.registry.add(mock_plugin("hw", tier="hardware", live=self.read))

    def read(self, selector):
        self.reads += 1
        free = (65 - self.reads) * GIB
        return DeviceInfo(
            device_type="hw",
            name="hw-1",
            total_bytes=64 * GIB,
            free_before_load_bytes=64 * GIB,
            free_bytes=free,
            index=0,
        )


def test_a_device_is_read_once_per_plan(mock_plugin):
    # S-22
    device = Falling(mock_plugin)
    plan = kvdock.plan(heads(), device="hw:0", registry=device.registry)
    assert device.reads == 1
    assert plan.device.free_bytes == 64 * GIB
    plan.replan(2 * GIB)
    plan.explain()
    plan.to_json()
    plan.bytes_for(8, 1)
    assert device.reads == 1


def test_eight_ranks_with_one_reading_make_one_plan(mock_plugin):
    # S-22
    device = Falling(mock_plugin)
    reading = kvdock.plan(heads(), device="hw:0", registry=device.registry).device
    ranks = [
        kvdock.plan(heads(), device=reading, parallel={"tp_size": 8}, registry=device.registry).to_json()
        for _ in range(8)
    ]
    assert len(set(ranks)) == 1
    assert device.reads == 1


def test_memory_that_peers_took_is_not_divided_once_more():
    # S-22: the budget is what this rank reads, whatever the number of ranks.
    one, eight = (
        kvdock.plan(
            heads(), device=CPU, options={"plugins": ()}, parallel={"tp_size": 8, "dp_size": n}, registry=core_only()
        )
        for n in (1, 8)
    )
    assert one.budget_bytes == eight.budget_bytes == GIB * 9 // 10


def test_planning_changes_none_of_its_inputs():
    # S-22
    options = kvdock.CacheOptions(max_running_requests=4)
    before = msgspec.json.encode((CPU, options))
    first, second = (kvdock.plan(heads(), device=CPU, options=options, registry=core_only()) for _ in range(2))
    assert msgspec.json.encode((CPU, options)) == before
    assert first.to_json() == second.to_json()
