"""Triton's kernel set keeps the promises of kernel sets.

Run by `test_suite` in a process of its own: with TRITON_INTERPRET=1 anywhere, without it on the accelerator.
"""

import os

from kvdock.kernels.triton_set import TritonKernels
from kvdock.testing.suites import KernelSuite

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class TestTritonKernels(KernelSuite):
    torch_device = "cpu" if IS_INTERPRETED else "cuda"
    if IS_INTERPRETED:  # a launch takes a thousand times as long
        page_sizes = (1, 3)
        counts = (0, 1, 37)

    def kernels(self):
        return TritonKernels()
