"""Kernel sets: what pools and allocators ask of a device. The torch form is `kvdock.kernels.reference`."""

from kvdock.kernels.interface import Kernels

__all__ = ["Kernels"]
