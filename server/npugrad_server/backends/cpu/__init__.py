"""The CPU backend: compiled kernels where they can be loaded, else the NumPy reference of the records."""

from npugrad_server.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
