"""Which kernel set a plan gets on an NVIDIA device, and what the user may say about it."""

import sys
import types
import warnings

import kvdock
import pytest
from kvdock import PlanError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.plugins.loading import PluginWarning  # noqa: E402
from kvdock_cuda import hooks, kernels, settings  # noqa: E402
from kvdock_cuda.streams import SideStream  # noqa: E402

TORCH = types.SimpleNamespace(cuda=None)
AMD = kvdock.DeviceInfo(
    device_type="cuda",
    name="amd",
    total_bytes=2**37,
    free_before_load_bytes=2**37,
    free_bytes=2**37,
    capabilities=("gfx942",),
)


def options(**given):
    side = given.pop("side_stream", None)
    own = {} if side is None else {"plugin_options": {"cuda": {"side_stream": side}}}
    return kvdock.CacheOptions(**given, **own)


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvdock.kernels.triton_set", None)


def test_triton_is_used_where_it_is_here():
    triton_set = pytest.importorskip("kvdock.kernels.triton_set")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kernels.kernel_set(TORCH, options())
    assert isinstance(found, triton_set.TritonKernels)
    assert found.side is None  # one launch writes keys and values already


@pytest.mark.parametrize(
    ("given", "is_beside"),
    [
        ({"side_stream": True}, True),
        ({"side_stream": True, "pd_multiplexing": True}, False),
        ({"side_stream": False}, False),
        ({"pd_multiplexing": True}, False),
    ],
)
def test_the_side_stream_is_asked_for_and_off_under_multiplexing(given, is_beside):
    pytest.importorskip("kvdock.kernels.triton_set")
    assert isinstance(kernels.kernel_set(TORCH, options(**given)).side, SideStream) == is_beside


@pytest.mark.parametrize(
    ("given", "is_beside"), [({}, True), ({"side_stream": False}, False), ({"pd_multiplexing": True}, False)]
)
def test_without_triton_torch_does_the_work_and_says_so(no_triton, given, is_beside):
    with pytest.warns(PluginWarning, match=r"Triton does not import here .* pip install 'kvdock\[triton\]'"):
        found = kernels.kernel_set(TORCH, options(**given))
    assert isinstance(found, ReferenceKernels)
    assert isinstance(found.side, SideStream) == is_beside


def test_strict_planning_refuses_to_do_without_triton(no_triton):
    with pytest.raises(PlanError, match=r"^strict=true refuses a warning: Triton does not import here"):
        kernels.kernel_set(TORCH, options(strict=True))


def test_the_hook_serves_its_own_devices(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    h200 = hooks.device_catalogue()["h200"]
    assert isinstance(hooks.get_kernels(h200, options(side_stream=False)), kernels.CudaKernels)
    assert hooks.get_kernels(AMD, options()) is None


def test_a_torch_for_other_devices_is_refused(monkeypatch):
    # L-02: no other device in its place
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(PlanError, match=r"^no CUDA device can be used: torch .* is a build for ROCm 6\.4"):
        hooks.get_kernels(hooks.device_catalogue()["h200"], options())


def test_an_extended_set_does_what_its_base_does():
    """Two slots of four rows of three: rows 1 and 6 are pages 0 and 1."""
    view, other = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    values = torch.arange(6.0).view(2, 3)
    found = kernels.extended(ReferenceKernels)(None)
    found.store_kv(view, other, torch.tensor([1, 6]), values, values + 10)
    assert view[0, 1].tolist() == [0, 1, 2]
    assert other[1, 2].tolist() == [13, 14, 15]
    assert type(found).__name__ == "CudaReferenceKernels"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"side_steam": True}, "cuda has no option 'side_steam'; did you mean 'side_stream'?; there are backends,"),
        ({"side_stream": 1}, "cuda takes backends, a list of names, and side_stream, true or false: Expected `bool"),
        ({"backends": "mine"}, "cuda takes backends, a list of names, and side_stream, true or false: Expected `array"),
    ],
)
def test_options_that_do_not_exist_are_refused(given, reason):
    with pytest.raises(PlanError) as caught:
        settings.of(kvdock.CacheOptions(plugin_options={"cuda": given}))
    assert str(caught.value).startswith(f"plugin_options: {reason}")
