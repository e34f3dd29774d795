"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """The smaller of what the machine has free and what the container's limit leaves."""
    limits = [_machine_available(meminfo)]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        left = _cgroup_left(cgroup / limit, cgroup / used)
        if left is not None:
            limits.append(left)
    return min(limits)


def human(num_bytes: float) -> str:
    """``num_bytes`` for people: 1.5 GiB."""
    value = float(num_bytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} {_UNITS[-1]}"


def _machine_available(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable")


def _cgroup_left(limit: Path, used: Path) -> int | None:
    """None: no such controller, or no limit. Page cache counts as used, but gives way: it is added back."""
    try:
        text = limit.read_text(encoding="ascii").strip()
        if text == "max":
            return None
        taken = int(used.read_text(encoding="ascii"))
        return max(0, int(text) - taken + _reclaimable(limit.parent / "memory.stat"))
    except (OSError, ValueError):
        return None


def _reclaimable(stat: Path) -> int:
    fields = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
