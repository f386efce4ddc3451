"""Kustomize, built once for each version on this machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.binary import cache_folder

VERSION = "v5.7.1"
PROGRAM = "sigs.k8s.io/kustomize/kustomize/v5"


def kustomize_binary() -> Path:
    """Return the program; its first build takes a minute.

    Raises:
        Skipped: there is no Go, or its modules cannot be had; the latter not on CI.
        RuntimeError: likewise, on CI.
    """
    if shutil.which("go") is None:
        pytest.skip("needs Go to build kustomize, and there is none on PATH")
    folder = cache_folder() / f"kustomize-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "kustomize").exists():
            _build(folder)
    return folder / "kustomize"


def _build(folder: Path) -> None:
    """Install into a folder beside it, then give it its name: whoever sees it sees it whole."""
    unfinished = folder / "unfinished"
    environment = {
        **os.environ,
        "GOBIN": str(unfinished),
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
    }
    built = subprocess.run(
        ["go", "install", f"{PROGRAM}@{VERSION}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join(built.stderr.split())[-1000:]
    if built.returncode != 0 and os.environ.get("CI"):
        raise RuntimeError(f"kustomize must build, got: {said}")
    if built.returncode != 0:
        pytest.skip(f"needs the Go modules of kustomize: {said}")
    (unfinished / "kustomize").replace(folder / "kustomize")


def objects_of(folder: Path) -> list[dict[str, Any]]:
    """Return what a folder with a kustomization comes to."""
    built = subprocess.run(
        [str(kustomize_binary()), "build", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))
