"""Datasets and runs that tests only read, created once per test session for all its workers."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from presage.schemas.storage.leases import LEASES
from tests import fork_server

Main = Callable[[Sequence[str]], int]
"""Runs a command in this process; returns its exit status."""


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


def in_pairs(*settings: Iterable[object], rest: bool = True) -> list[Any]:
    """Return a diagonal of the product of settings, with each value of each setting at least once.

    With `rest`, the others of the product are there, too, marked `nightly`.
    """
    values = [list(setting) for setting in settings]
    diagonal = {
        tuple(row % len(setting) for setting in values) for row in range(max(map(len, values)))
    }
    return [
        pytest.param(
            *(setting[place] for setting, place in zip(values, places, strict=True)),
            marks=[] if places in diagonal else [pytest.mark.nightly],
        )
        for places in product(*(range(len(setting)) for setting in values))
        if rest or places in diagonal
    ]


def output_of(main: Main, words: Sequence[str]) -> str:
    """Return what a command prints; it must succeed."""
    return printed_by(main, words, 0)[0]


def json_of(main: Main, words: Sequence[str]) -> Any:
    """Return the object that a command prints in one line; it must succeed."""
    (line,) = output_of(main, words).splitlines()
    return json.loads(line)


def error_of(main: Main, words: Sequence[str], status: int = 1) -> str:
    """Return what a command prints on stderr; it must end with a status."""
    return printed_by(main, words, status)[1]


def refusal_of(main: Main, words: Sequence[str]) -> str:
    """Return the only line that a command prints, which must be an error, without `error: `."""
    output, errors = printed_by(main, words, 1)
    assert (output, errors.count("\n")) == ("", 1), errors
    return errors.removeprefix("error: ").removesuffix("\n")


def printed_by(main: Main, words: Sequence[str], status: int) -> tuple[str, str]:
    """Return what a command prints on stdout and on stderr; it must end with a status."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        assert main(words) == status, errors.getvalue()
    return output.getvalue(), errors.getvalue()


def with_long(values: Iterable[str], *long: str) -> list[Any]:
    """Return the parameters of a test; the `long` ones are marked `chaos`."""
    marks = {value: [pytest.mark.chaos] if value in long else [] for value in values}
    assert set(long) <= set(marks), f"unknown: {set(long) - set(marks)}"
    return [pytest.param(value, id=value, marks=marks[value]) for value in marks]
