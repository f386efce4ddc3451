"""What several test files read, made once for all workers of a session."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import forks

_FOLDER = Path(os.environ[forks.ADDRESS], "made_once")


def made_once(make: Callable[..., object], *arguments: Any) -> Path:
    """Return the folder that `make(folder, *arguments)` filled, on the first call in a session.

    It is named by the hash of the file that defines `make` and of the arguments, and it is shared:
    whoever changes something takes a `linked` copy.
    """
    source = Path(inspect.getfile(make)).read_bytes()
    called = f"{make.__module__}.{make.__qualname__}{arguments!r}".encode()
    folder = _FOLDER / hashlib.sha256(source + called).hexdigest()[:16]
    done = folder.with_suffix(".done")
    _FOLDER.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a test that failed here left it
            folder.mkdir()
            make(folder, *arguments)
            done.touch()
    return folder


def linked(source: Path, target: Path) -> Path:
    """Copy a folder by hard links: replacing or removing a file there changes no other copy.

    Writing into a file changes all of them.
    """
    shutil.copytree(source, target, copy_function=os.link, symlinks=True)
    return target
