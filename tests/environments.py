"""Environments of packages that ours does not hold, each lock installed once on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.binary import cache_folder


def environment_of(name: str, lock: Path, own: Path) -> Path:
    """Return the folder of an environment's programs, such as `python`.

    Args:
        name: of the environment, in messages and in the cache.
        lock: what it holds, with hashes.
        own: folder of the programs of our environment.

    Raises:
        Skipped: packages cannot be had; not on CI.
        RuntimeError: likewise, on CI.
    """
    folder = cache_folder() / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            _install(name, lock, own, folder / "venv")
            (folder / "installed").touch()
    return folder / "venv" / "bin"


def _install(name: str, lock: Path, own: Path, folder: Path) -> None:
    uv, python = own / "uv", folder / "bin" / "python"
    made = ["venv", "--quiet", "--clear", "--python", str(own / "python"), str(folder)]
    synced = ["pip", "sync", "--quiet", "--require-hashes", "--python", str(python), str(lock)]
    for words in (made, synced):
        done = subprocess.run([str(uv), *words], capture_output=True, text=True, check=False)
        if done.returncode and os.environ.get("CI"):
            raise RuntimeError(f"{name} must be installed, got: {done.stderr[-1000:]}")
        if done.returncode:
            pytest.skip(f"needs {name}, which cannot be installed: {done.stderr[-300:]}")
