"""Installed plugins as folders of `site/`: each holds a distribution's metadata and its module."""

import sys
from pathlib import Path

import pytest
from kvdock.device import DeviceInfo
from kvdock.layout import LayerGroup, SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.plugins.discovery import discover
from kvdock.queries import AllocatorQuery, PoolQuery, RequestQuery

SITE = Path(__file__).parent / "site"


@pytest.fixture
def site(monkeypatch):
    """Put folders of `site/` on the path and return what is discovered in them; their modules are forgotten later."""

    def install(*names):
        folders = [str(SITE / name) for name in names]
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(folder)
        return discover(folders)

    yield install
    for name in [name for name in sys.modules if name.startswith("site_")]:
        del sys.modules[name]


def device(device_type="cpu", name="", **fields):
    sizes = {"total_bytes": 2**30, "free_before_load_bytes": 2**30, "free_bytes": 2**30}
    return DeviceInfo(device_type=device_type, name=name or f"{device_type}-1", **sizes, **fields)


def model(kind="mha", family="", layers=2):
    params = MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8)
    return ModelSpec(
        name="m",
        architecture="M",
        family=family,
        layers=(LayerSpec(kind=kind, params=params),) * layers,
        context_length=256,
        dtype="bfloat16",
    )


FULL = Space(name="full", rule=SizeRule(per_token=(1, 1)), page_size=16)


def base(device_type="cpu", spec=None, **fields):
    return {
        "model": spec or model(),
        "options": CacheOptions(),
        "parallel": Parallelism(),
        "device": device(device_type),
        **fields,
    }


@pytest.fixture
def pool_query():
    """A function that gives the query for one group of layers of a kind on a device."""

    def make(kind="mha", device_type="cpu", family="", **fields):
        spec = model(kind, family)
        group = LayerGroup(name="full", kind=kind, space="full", layers=tuple(enumerate(spec.layers)))
        spaces = {"full": FULL}
        return PoolQuery(**base(device_type, spec, **fields), kind=kind, group=group, spaces=spaces, groups=(group,))

    return make


@pytest.fixture
def router_query():
    return PoolQuery(**base(), kind="router", group=None, spaces={"full": FULL})


@pytest.fixture
def allocator_query():
    return AllocatorQuery(**base(), spaces=(FULL,))


@pytest.fixture
def request_query():
    return RequestQuery(**base(), spaces={"full": FULL}, groups=(), columns=256)


@pytest.fixture
def make_device():
    return device


@pytest.fixture
def make_model():
    return model


@pytest.fixture
def query_fields():
    """A function that gives the fields that every query has."""
    return base
