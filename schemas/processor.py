"""The processor's level of the instruction set, by which compiled modules are chosen."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}
"""Levels of the x86-64 psABI that modules are compiled for, highest first, and what each needs."""


@cache
def processor_level() -> str:
    """Return the highest level that modules are compiled for and the processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    features = set(next((x for x in lines if x.startswith("flags")), "").split())
    return next((level for level, needed in _LEVELS.items() if needed <= features), "generic")


def module_folder(package: Path) -> str:
    """Return the folder of a package's compiled modules, to be added to its `__path__`.

    Raises:
        ImportError: there are none for this processor.
    """
    folder = package / processor_level()
    if not any(folder.glob("*.so")):
        raise ImportError(
            f"compiled modules are missing in {folder}; run `make setup` in a source tree, or "
            "install Presage's wheel (docs/install.md)"
        )
    return str(folder)


if __name__ == "__main__":  # for `make setup`, which compiles for this processor alone
    print(processor_level())  # noqa: T201
