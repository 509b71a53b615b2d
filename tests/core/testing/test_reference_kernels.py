"""The torch kernels keep the promises that other kernel sets are held to by them."""

import pytest
from kvdock.testing.suites import KernelSuite

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


class TestReferenceKernels(KernelSuite):
    runs_on_meta = True

    def kernels(self):
        from kvdock.kernels.reference import ReferenceKernels

        return ReferenceKernels()
