"""Python and the packages of a lock, compared with what is installed; nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from scheduler.doctor.finding import Finding

PYTHON = (3, 11)
"""The one version that stored bytes and bit-equal training are tested on (`pyproject.toml`)."""
SHOWN = 5
"""Packages that a finding names."""
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def python_finding(version: tuple[int, int]) -> Finding:
    """Compare the interpreter's version with the one that is tested.

    Args:
        version: major and minor.
    """
    return Finding(
        name="python",
        ok=version == PYTHON,
        must=f"be {'.'.join(map(str, PYTHON))}",
        found=".".join(map(str, version)),
        fix="install it, then run make setup PYTHON=/path/to/python3.11",
    )


def wheels_finding(lock: Path, sites: Sequence[str]) -> Finding:
    """Compare the versions of a lock with what is installed.

    Args:
        lock: a requirements file with exact versions.
        sites: directories that are searched for packages, the first one wins.
    """
    must = f"have the versions of {lock.name}"
    fix = f"run make setup, or uv pip sync {lock.name}"
    try:
        wanted = locked(lock.read_text(encoding="utf-8"))
    except OSError as error:
        found = f"no lock: {error.strerror}"
        return Finding(name="wheels", ok=False, must=must, found=found, fix="name another --lock")
    problems = differences(wanted, installed(sites))
    shown = "; ".join(problems[:SHOWN])
    more = f"; {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return Finding(
        name="wheels",
        ok=not problems,
        must=must,
        found=f"{shown}{more}" or f"all {len(wanted)}",
        fix=fix,
    )


def locked(text: str) -> dict[str, str]:
    r"""Return the packages of a lock and their versions, names in their normal form.

    Example:
        >>> locked("absl-py==2.5.1 \\\n    --hash=sha256:0\nPyYAML==6.0 ; python_version > '3'\n")
        {'absl-py': '2.5.1', 'pyyaml': '6.0'}
    """
    return {normal(name): version for name, version in _PINNED.findall(text)}


def installed(sites: Sequence[str]) -> dict[str, str]:
    """Return the packages that some directories hold and their versions."""
    found: dict[str, str] = {}
    for each in distributions(path=list(sites)):
        name: str | None = each.metadata["Name"]
        if name:
            found.setdefault(normal(name), each.version)
    return found


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return what lacks or has another version, in the order of names.

    A local part of a version (`+cpu`) is another build of the same.

    Example:
        >>> differences({"a": "1.0", "b": "2.0", "c": "3"}, {"a": "1.0+cpu", "b": "2.1"})
        ['b 2.1 instead of 2.0', 'no c 3']
    """
    problems: list[str] = []
    for name in sorted(wanted):
        version = found.get(name)
        if version is None:
            problems.append(f"no {name} {wanted[name]}")
        elif wanted[name] not in (version, version.partition("+")[0]):
            problems.append(f"{name} {version} instead of {wanted[name]}")
    return problems


def normal(name: str) -> str:
    """Return a package's name as indexes compare it.

    Example:
        >>> normal("Apache_Beam")
        'apache-beam'
    """
    return re.sub(r"[-_.]+", "-", name).lower()
