"""Kernels of an NPU: the only modules with torch at the top."""
