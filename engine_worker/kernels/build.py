"""Compiles the native CPU kernels at first use and loads them.

The library is plain C behind ctypes: no torch headers, so one build serves every torch version. It is compiled with
OpenMP but linked without an OpenMP runtime, so that it binds to the one torch has loaded: one pool of threads.

``python -m engine_worker.kernels.build`` compiles them ahead of time, for an image or a package.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import structlog

SOURCE_DIR: Final = Path(__file__).parent / "native"
TargetName = Literal["avx512", "avx2"]
# What the code is compiled for, best first: flags of the CPU as /proc/cpuinfo names them and as the compiler does.
TARGETS: Final[dict[TargetName, dict[str, str]]] = {
    "avx512": {
        "avx512f": "-mavx512f",
        "avx512bw": "-mavx512bw",
        "avx512vl": "-mavx512vl",
        "avx512dq": "-mavx512dq",
        "avx512_vnni": "-mavx512vnni",
        "avx512_bf16": "-mavx512bf16",
        "fma": "-mfma",
        "f16c": "-mf16c",
    },
    "avx2": {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"},
}
# Never -march=native (the cache may be shared by machines) nor -ffast-math (it reorders sums). Contraction is off so
# that a product and a sum round alike wherever the compiler inlines them.
COMPILE_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w")
COMPILE_TIMEOUT_S: Final = 300

log = structlog.get_logger(__name__)


class KernelsUnavailable(Exception):
    """The native kernels cannot be had on this machine; the message says why."""


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Where and with what the kernels are compiled."""

    cache_dir: Path = field(default_factory=_user_cache)
    compiler: str = "g++"  # name or path of a GCC or Clang C++ compiler
    cpuinfo: Path = Path("/proc/cpuinfo")
    source_dir: Path = SOURCE_DIR  # another version's, to compare the two in one run
    target: Literal["auto", TargetName] = "auto"  # auto: the best that the CPU has


def missing_cpu_flags(cpuinfo: Path, target: TargetName) -> tuple[str, ...]:
    """The flags ``target`` needs and this CPU lacks: all of them where the file cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    present = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    return tuple(flag for flag in TARGETS[target] if flag not in present)


def choose_target(settings: BuildSettings) -> TargetName:
    """The target asked for, or the best that this CPU can run. Raises KernelsUnavailable if it cannot."""
    wanted = tuple(TARGETS) if settings.target == "auto" else (settings.target,)
    missing = {target: missing_cpu_flags(settings.cpuinfo, target) for target in wanted}
    for target, flags in missing.items():
        if not flags:
            return target
    lacking = "; ".join(f"{', '.join(flags)} ({target})" for target, flags in missing.items())
    raise KernelsUnavailable(f"this CPU has no {lacking}")


def build(settings: BuildSettings) -> Path:
    """Path of the compiled library, compiled now if the cache has none for these sources, compiler and flags.

    Raises KernelsUnavailable if the CPU or the compiler cannot.
    """
    flags = (*COMPILE_FLAGS, *TARGETS[choose_target(settings)].values())
    path = settings.cache_dir / f"kernels-{_key(settings, flags)}.so"
    if path.exists():
        return path
    try:
        settings.cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():  # another process may have built it meanwhile
                _compile(settings, flags, path)
    except OSError as e:
        raise KernelsUnavailable(f"the cache directory {settings.cache_dir} cannot be used: {e}") from e
    return path


def load(settings: BuildSettings) -> ctypes.CDLL:
    """The compiled library. Raises KernelsUnavailable."""
    path = build(settings)
    _expose_openmp()
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise KernelsUnavailable(f"{path.name} cannot be loaded: {e}") from e


def _key(settings: BuildSettings, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    digest.update(_compiler_version(settings).encode())
    digest.update(" ".join(flags).encode())
    for source in sorted(settings.source_dir.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_version(settings: BuildSettings) -> str:
    if shutil.which(settings.compiler) is None:
        raise KernelsUnavailable(f"there is no compiler {settings.compiler!r}")
    return _run([settings.compiler, "--version"])


def _compile(settings: BuildSettings, flags: tuple[str, ...], path: Path) -> None:
    log.info("kernels_compile", compiler=settings.compiler, into=path.name, note="once, about 10 s")
    with tempfile.TemporaryDirectory(dir=settings.cache_dir) as work:
        part, library = Path(work) / "cpu.o", Path(work) / "kernels.so"
        _run([settings.compiler, *flags, "-c", str(settings.source_dir / "cpu.cpp"), "-o", str(part)])
        _run([settings.compiler, "-shared", str(part), "-o", str(library)])  # no -fopenmp: see the module
        library.replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as e:
        raise KernelsUnavailable(f"{command[0]} failed: {(e.stderr or '').strip()[:500]}") from e
    except (OSError, subprocess.TimeoutExpired) as e:
        raise KernelsUnavailable(f"{command[0]} failed: {e}") from e
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _expose_openmp() -> None:
    """Make the OpenMP runtime that torch has loaded visible to libraries loaded later."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    import torch  # noqa: F401  (loads its runtime)

    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp" in line}
    if not paths:
        raise KernelsUnavailable("torch has loaded no OpenMP runtime")
    ctypes.CDLL(min(paths), mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    log.info("kernels_ready", path=str(build(BuildSettings())))
