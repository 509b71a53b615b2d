"""Which kernel set a plan gets on an AMD device."""

import sys
import warnings

import kvdock
import pytest
from kvdock import PlanError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.plugins.loading import PluginWarning  # noqa: E402
from kvdock_rocm import hooks, kernels  # noqa: E402

NVIDIA = kvdock.DeviceInfo(
    device_type="cuda",
    name="nvidia",
    total_bytes=2**37,
    free_before_load_bytes=2**37,
    free_bytes=2**37,
    capabilities=("sm_90",),
)


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvdock.kernels.triton_set", None)


def test_triton_is_used_where_it_is_here():
    triton_set = pytest.importorskip("kvdock.kernels.triton_set")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kernels.kernel_set(kvdock.CacheOptions())
    assert isinstance(found, triton_set.TritonKernels)
    assert isinstance(found, kernels.RocmKernels)


def test_without_triton_torch_does_the_work_and_says_so(no_triton):
    with pytest.warns(PluginWarning, match=r"^Triton does not import here .* install the pytorch-triton-rocm"):
        found = kernels.kernel_set(kvdock.CacheOptions())
    assert type(found).__name__ == "RocmReferenceKernels"


def test_strict_planning_refuses_to_do_without_triton(no_triton):
    with pytest.raises(PlanError, match=r"^strict=true refuses a warning: Triton does not import here"):
        kernels.kernel_set(kvdock.CacheOptions(strict=True))


def test_the_hook_serves_its_own_devices(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    mi300x = hooks.device_catalogue()["mi300x"]
    assert isinstance(hooks.get_kernels(mi300x, kvdock.CacheOptions()), kernels.RocmKernels)
    assert hooks.get_kernels(NVIDIA, kvdock.CacheOptions()) is None


@pytest.mark.parametrize(("cuda", "build"), [(None, "CPUs alone"), ("12.8", "CUDA 12.8")])
def test_a_torch_for_other_devices_is_refused(monkeypatch, cuda, build):
    # L-02: no other device in its place
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(PlanError, match=rf"^no ROCm device can be used: torch .* is a build for {build}"):
        hooks.get_kernels(hooks.device_catalogue()["mi300x"], kvdock.CacheOptions())


def test_an_extended_set_does_what_its_base_does():
    """Two slots of four rows of three: rows 1 and 6 are pages 0 and 1."""
    view, other = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    values = torch.arange(6.0).view(2, 3)
    kernels.extended(ReferenceKernels)().store_kv(view, other, torch.tensor([1, 6]), values, values + 10)
    assert view[0, 1].tolist() == [0, 1, 2]
    assert other[1, 2].tolist() == [13, 14, 15]
