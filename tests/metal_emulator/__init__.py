"""Runs the kernels of mx.fast.metal_kernel on a Linux CPU, and checks them; see README.md."""

from .emulator import MetalKernel, as_mlx, can_run
from .errors import MetalError
from .static import find_clang, static_check

__all__ = ["MetalError", "MetalKernel", "as_mlx", "can_run", "find_clang", "static_check"]
