"""What every launcher needs to know of the place it runs in."""

from __future__ import annotations

import os
from typing import Final

import torch

IS_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether arithmetic on ``dtype`` must be done in fp32 because the interpreter would get it wrong."""
    return IS_INTERPRETED and dtype == torch.bfloat16


def is_usable() -> bool:
    """Whether a launch can work: a GPU with a driver, or the interpreter. Import success says nothing about it."""
    return IS_INTERPRETED or torch.cuda.is_available()
