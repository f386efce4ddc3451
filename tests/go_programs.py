"""Programs of others in Go, each version built once on this machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.binary import cache_folder


def go_program(package: str, version: str) -> Path:
    """Return a program; its first build takes a minute or two.

    Args:
        package: its module; the program has the name of the last part that is no version.
        version: of the module.

    Raises:
        Skipped: there is no Go, or the modules cannot be had; the latter not on CI.
        RuntimeError: likewise, on CI.
    """
    name = [part for part in package.split("/") if not part[1:].isdigit()][-1]
    if shutil.which("go") is None:
        pytest.skip(f"needs Go to build {name}, and there is none on PATH")
    folder = cache_folder() / f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _build(folder, name, f"{package}@{version}")
    return folder / name


def _build(folder: Path, name: str, wanted: str) -> None:
    """Install into a folder beside it, then give it its name: whoever sees it sees it whole."""
    unfinished = folder / "unfinished"
    environment = {
        **os.environ,
        "GOBIN": str(unfinished),
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
    }
    built = subprocess.run(
        ["go", "install", wanted],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join(built.stderr.split())[-1000:]
    if built.returncode != 0 and os.environ.get("CI"):
        raise RuntimeError(f"{name} must build, got: {said}")
    if built.returncode != 0:
        pytest.skip(f"needs the Go modules of {name}: {said}")
    (unfinished / name).replace(folder / name)
