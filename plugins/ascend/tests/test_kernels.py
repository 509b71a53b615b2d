"""The kernel set of an NPU gives what the torch form gives, over a strict stand-in for its operators."""

import importlib.util
from pathlib import Path

from kvdock.testing.suites import KernelSuite


class TestNpuKernels(KernelSuite):
    torch_device = "cpu"

    def kernels(self):
        from kvdock_ascend.kernels.npu_set import NpuKernels
        from kvdock_ascend.ops import Ops

        spec = importlib.util.spec_from_file_location("strict_npu", Path(__file__).with_name("fake_npu.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return NpuKernels(Ops(module.TorchNpu()))
