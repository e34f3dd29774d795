"""Compiling the kernels at first use, and what happens where that cannot be."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine_worker.kernels.build import (
    SOURCE_DIR,
    TARGETS,
    BuildSettings,
    KernelsUnavailable,
    TargetName,
    build,
    choose_target,
    missing_cpu_flags,
)
from engine_worker.kernels.cpu import CpuOps
from tests.unit.engine_worker.kernels.native import needs_native


def cpuinfo(path: Path, flags: str) -> Path:
    path.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
    return path


def compiler(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


ALL_FLAGS = " ".join(flag for flags in TARGETS.values() for flag in flags)
# Answers --version; else makes a file where -o says, and counts its calls.
COUNTING = """
[ "$1" = --version ] && echo 1.0 && exit
while [ "$1" != -o ]; do shift; done
echo call >> "$(dirname "$0")/calls"
sleep 0.2
echo built > "$2"
"""


def test_what_a_cpu_lacks_is_named(tmp_path: Path) -> None:
    settings = BuildSettings(tmp_path, cpuinfo=cpuinfo(tmp_path / "cpuinfo", "avx2 fma"))
    with pytest.raises(KernelsUnavailable, match=r"avx512_bf16, f16c \(avx512\); f16c \(avx2\)"):
        build(settings)
    for target, flags in TARGETS.items():
        assert missing_cpu_flags(tmp_path / "nothing", target) == tuple(flags)


@pytest.mark.parametrize(("flags", "target"), [(ALL_FLAGS, "avx512"), ("avx512f avx2 fma f16c", "avx2")])
def test_the_best_target_of_the_cpu_is_chosen(tmp_path: Path, flags: str, target: TargetName) -> None:
    assert choose_target(BuildSettings(cpuinfo=cpuinfo(tmp_path / "cpuinfo", flags))) == target


def test_a_target_can_be_asked_for_and_is_another_library(tmp_path: Path) -> None:
    every, little = cpuinfo(tmp_path / "every", ALL_FLAGS), cpuinfo(tmp_path / "little", "avx2 fma f16c")
    cc = compiler(tmp_path / "cc", COUNTING)
    assert choose_target(BuildSettings(cpuinfo=every, target="avx2")) == "avx2"
    with pytest.raises(KernelsUnavailable, match="avx512_vnni"):
        choose_target(BuildSettings(cpuinfo=little, target="avx512"))
    best, forced, only = (
        build(BuildSettings(tmp_path / "cache", cc, info, target=target))
        for info, target in ((every, "auto"), (every, "avx2"), (little, "auto"))
    )
    assert best != forced == only


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    settings = BuildSettings(tmp_path, "no-such-compiler", cpuinfo(tmp_path / "cpuinfo", ALL_FLAGS))
    with pytest.raises(KernelsUnavailable, match="no-such-compiler"):
        build(settings)


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    fails = compiler(tmp_path / "cc", '[ "$1" = --version ] && exit 0\necho "cannot do this" >&2; exit 1')
    with pytest.raises(KernelsUnavailable, match="cannot do this"):
        build(BuildSettings(tmp_path / "cache", fails, cpuinfo(tmp_path / "cpuinfo", ALL_FLAGS)))
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = BuildSettings(tmp_path / "file" / "cache", compiler(tmp_path / "cc", COUNTING))
    with pytest.raises(KernelsUnavailable, match="cache"):
        build(BuildSettings(settings.cache_dir, settings.compiler, cpuinfo(tmp_path / "cpuinfo", ALL_FLAGS)))


def test_many_at_once_compile_once_and_later_ones_not_at_all(tmp_path: Path) -> None:
    settings = BuildSettings(
        tmp_path / "cache", compiler(tmp_path / "cc", COUNTING), cpuinfo(tmp_path / "cpuinfo", ALL_FLAGS)
    )
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build(settings), range(4)))
    assert len(paths) == 1
    assert build(settings).read_text() == "built\n"
    assert (tmp_path / "calls").read_text().count("call") == 2  # one compile, one link


def test_other_sources_are_another_library(tmp_path: Path) -> None:
    copy = tmp_path / "sources"
    shutil.copytree(SOURCE_DIR, copy)
    (copy / "simd.h").write_text("// changed\n")
    usual = {
        "cache_dir": tmp_path / "cache",
        "compiler": compiler(tmp_path / "cc", COUNTING),
        "cpuinfo": cpuinfo(tmp_path / "cpuinfo", ALL_FLAGS),
    }
    assert build(BuildSettings(**usual)) != build(BuildSettings(**usual, source_dir=copy))


def test_ops_of_a_machine_without_kernels_say_so(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable):
        CpuOps(build=BuildSettings(tmp_path, "no-such-compiler"))


@needs_native
def test_the_kernels_share_the_threads_of_torch() -> None:
    CpuOps()
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len(runtimes) == 1
