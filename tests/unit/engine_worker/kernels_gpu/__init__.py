"""Triton kernels, run by Triton's interpreter on the CPU."""
