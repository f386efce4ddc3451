"""Datasets and runs that tests only read, created once per test session for all its workers."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from schemas.leases import LEASES
from tests import fork_server


def make_once(make: Callable[..., object], *arguments: object) -> Path:
    """Return a directory filled by `make(directory, *arguments)`, which runs only once.

    It is named by a hash of the file that defines `make` and of the arguments. All tests share it;
    a test that modifies files uses a `hard_links` copy.
    """
    source = Path(inspect.getfile(make)).read_bytes()
    call = f"{make.__module__}.{make.__qualname__}{arguments!r}".encode()
    shared = Path(os.environ[fork_server.ADDRESS], "shared")
    folder = shared / hashlib.sha256(source + call).hexdigest()[:16]
    complete = folder.with_suffix(".complete")
    shared.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a failed attempt
            folder.mkdir()
            make(folder, *arguments)
            complete.touch()
    return folder


def hard_links(source: Path, target: Path) -> Path:
    """Copy a directory by hard links; files may be replaced or removed, not modified in place.

    Leases are left out: another test may read the directory meanwhile.
    """
    ignore = shutil.ignore_patterns(LEASES)
    shutil.copytree(source, target, copy_function=os.link, symlinks=True, ignore=ignore)
    return target


def with_long(values: Iterable[str], *long: str) -> list[Any]:
    """Return the parameters of a test; the `long` ones are marked `chaos`."""
    marks = {value: [pytest.mark.chaos] if value in long else [] for value in values}
    assert set(long) <= set(marks), f"unknown: {set(long) - set(marks)}"
    return [pytest.param(value, id=value, marks=marks[value]) for value in marks]


def each_once(first: Iterable[str], second: Iterable[str], *, rest: bool = True) -> list[Any]:
    """Return pairs of the values of two settings in which each value occurs.

    With `rest`, all other pairs follow, marked `nightly`.
    """
    a, b = list(first), list(second)
    pairs = [(a[n % len(a)], b[n % len(b)]) for n in range(max(len(a), len(b)))]
    others = [pair for pair in itertools.product(a, b) if rest and pair not in pairs]
    return [*pairs, *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in others)]
