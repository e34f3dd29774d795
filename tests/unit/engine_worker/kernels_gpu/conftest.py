"""The interpreter must be chosen before anything imports a kernel: the decorator reads the variable."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
