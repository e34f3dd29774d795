"""Triton kernels, one operator a file: kernel and launcher.

They run on a GPU, and on a CPU in Triton's interpreter when ``TRITON_INTERPRET=1`` is set before the import (tests).
The interpreter multiplies the bit patterns of bf16 (triton issue 11584), so each kernel that does arithmetic on 16-bit
values takes a constexpr ``UPCAST`` that makes it compute in fp32.
"""
