"""The kernel sets of an NVIDIA device keep the promises of kernel sets on the device itself."""

import kvdock
import pytest
from kvdock.testing.suites import KernelSuite

torch = pytest.importorskip("torch")

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock_cuda.kernels import extended, kernel_set  # noqa: E402
from kvdock_cuda.streams import SideStream  # noqa: E402

IS_HERE = torch.cuda.is_available() and torch.version.cuda is not None


@pytest.mark.device
@pytest.mark.skipif(not IS_HERE, reason="needs an NVIDIA device")
class TestCudaKernels(KernelSuite):
    torch_device = "cuda"

    def kernels(self):
        return kernel_set(torch, kvdock.CacheOptions())


@pytest.mark.device
@pytest.mark.skipif(not IS_HERE, reason="needs an NVIDIA device")
class TestTorchBesideASideStream(KernelSuite):
    torch_device = "cuda"

    def kernels(self):
        return extended(ReferenceKernels)(SideStream(torch))
