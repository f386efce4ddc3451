"""Builds the program that holds the servers of a cluster, once for each state of its source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "src"
SOURCE_FILES = ("go.mod", "go.sum", "main.go")
ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOTOOLCHAIN": "local",
    "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false",
}
"""Of Go: a static program, the Go that is installed, the modules of go.sum and no others."""
VERSION = "k8s.io/component-base/version"
"""The Go package that keeps what a server says of its version."""
LAST_CHARACTERS = 1000
"""Of what Go printed, in the message of a build that failed."""

needs_cluster = pytest.mark.skipif(
    shutil.which("go") is None,
    reason="needs Go to build the servers of a cluster, and there is none on PATH",
)


def cluster_binary() -> Path:
    """Return the program, built if this source was not built before on this machine.

    The first build takes minutes, and a few gigabytes in Go's caches. It is told as a warning,
    which pytest shows at its end. Tests that start beside it wait for it.

    Raises:
        Skipped: there is no Go, or its modules cannot be had; the latter not on CI.
        RuntimeError: the build failed.
    """
    if shutil.which("go") is None:
        pytest.skip("needs Go to build the servers of a cluster, and there is none on PATH")
    binary = cache_folder() / f"kubetest-{source_hash()}" / "kubetest"
    binary.parent.mkdir(parents=True, exist_ok=True)
    with (binary.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            _build(binary)
    return binary


def cache_folder() -> Path:
    """Return where builds are kept; nothing there is ever removed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "presage"


def source_hash() -> str:
    """Return what names a build: a hash of all that goes into it but Go itself."""
    digest = hashlib.sha256()
    for name in SOURCE_FILES:
        content = (SOURCE / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def kubernetes_version() -> str:
    """Return the version in go.mod, such as `v1.36.3`."""
    found = re.search(r"^\tk8s\.io/kubernetes (v\S+)$", (SOURCE / "go.mod").read_text(), re.M)
    assert found, "go.mod names the version of Kubernetes"
    return found[1]


def _build(binary: Path) -> None:
    """Build into a file beside it, then give it its name: whoever sees it sees it whole."""
    begin_sec = time.monotonic()
    listed = _run_go("list", "-deps", ".")  # brings the modules
    if listed.returncode != 0 and not os.environ.get("CI"):
        pytest.skip(f"needs the Go modules of a cluster's servers: {_words(listed)}")
    unfinished = binary.with_suffix(".unfinished")
    built = _run_go("build", f"-ldflags={_link_flags()}", "-o", str(unfinished), ".")
    if built.returncode != 0:
        raise RuntimeError(f"the servers of a cluster must build, got: {_words(built)}")
    unfinished.replace(binary)
    took_sec = time.monotonic() - begin_sec
    warnings.warn(f"built the servers of a cluster in {took_sec:.0f} s: {binary}", stacklevel=2)


def _run_go(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Go in the source; its proxy, caches and certificates are those of the environment."""
    command: Sequence[str] = ("go", *arguments)
    flags = f"{os.environ.get('GOFLAGS', '')} {ENVIRONMENT['GOFLAGS']}".strip()
    environment = {**os.environ, **ENVIRONMENT, "GOFLAGS": flags}
    return subprocess.run(
        command, cwd=SOURCE, env=environment, capture_output=True, text=True, check=False
    )


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())[-LAST_CHARACTERS:]


def _link_flags() -> str:
    version = kubernetes_version()
    linked = {"gitVersion": version, "gitMajor": "1", "gitMinor": version.split(".")[1]}
    return "-s -w " + " ".join(f"-X {VERSION}.{name}={value}" for name, value in linked.items())
