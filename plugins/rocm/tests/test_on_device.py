"""The kernel sets of an AMD device keep the promises of kernel sets on the device itself."""

import kvdock
import pytest
from kvdock.testing.suites import KernelSuite

torch = pytest.importorskip("torch")

from kvdock_rocm.kernels import kernel_set  # noqa: E402

IS_HERE = torch.cuda.is_available() and torch.version.hip is not None


@pytest.mark.device
@pytest.mark.skipif(not IS_HERE, reason="needs an AMD device")
class TestRocmKernels(KernelSuite):
    torch_device = "cuda"  # as torch calls AMD devices, too

    def kernels(self):
        return kernel_set(kvdock.CacheOptions())
