"""Tools outside our environment, each version installed once on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from presage.schemas.processor import processor_level
from tests.cluster.binary import cache_folder

WHEEL_SOURCES = (
    *("CMakeLists.txt", "README.md", "pyproject.toml"),
    *("pipelines", "presage", "scheduler", "schemas", "trainer"),
)


def install_environment(name: str, lock: Path, programs: Path) -> Path:
    """Install a lock into an environment of its own; return the folder of its programs.

    Args:
        name: of the environment, in messages and in the cache.
        lock: packages with hashes.
        programs: folder of our own environment's programs.

    Raises:
        Skipped: the packages cannot be installed; not on CI.
        RuntimeError: the same on CI.
    """
    folder = cache_folder() / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            sync_environment(name, lock, programs, folder / "venv")
            (folder / "installed").touch()
    return folder / "venv" / "bin"


def sync_environment(name: str, lock: Path, programs: Path, folder: Path) -> None:
    """Install a lock into a new environment; arguments as above, and its folder."""
    uv, python = programs / "uv", folder / "bin" / "python"
    run_uv(uv, name, ["venv", "--clear", "--python", programs / "python", folder])
    run_uv(uv, name, ["pip", "sync", "--require-hashes", "--python", python, lock])


def install_wheel(repository: Path, lock: Path) -> Path:
    """Install a lock and our wheel, as images do; return the folder of the programs.

    Args:
        repository: the source tree.
        lock: packages with hashes.

    Raises:
        Skipped: as `install_environment`.
        RuntimeError: the same on CI.
    """
    own = repository / ".venv" / "bin"
    name = lock.stem.removeprefix("requirements-")
    wheel = build_wheel(repository)
    folder = wheel.parent / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    with (wheel.parent / "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            sync_environment(name, lock, own, folder)
            words = ["pip", "install", "--no-deps", "--python", folder / "bin" / "python", wheel]
            run_uv(own / "uv", "the wheel", words)
            (folder / "installed").touch()
    return folder / "bin"


def build_wheel(repository: Path) -> Path:
    """Build our wheel for this processor alone, which takes half as long, once for these sources.

    Returns:
        The wheel, for the oldest Linux that it runs on, in a folder of its own.
    """
    own, digest = repository / ".venv" / "bin", hashlib.sha256()
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *WHEEL_SOURCES]
    listed = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=True)
    for path in map(repository.joinpath, sorted(listed.stdout.splitlines())):
        digest.update(str(path.relative_to(repository)).encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    folder = cache_folder() / f"wheel-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            level = f"cmake.define.LEVELS={processor_level()}"
            words = ["uv", "build", "--quiet", "--wheel", "--no-build-isolation", "--python"]
            words += [own / "python", "--config-setting", level, "--out-dir", folder / "built"]
            _run_own(own, [*words, repository])
            words = ["auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir"]
            _run_own(own, [*words, folder, *(folder / "built").glob("*.whl")])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _run_own(own: Path, words: Sequence[str | Path]) -> None:
    environment = {**os.environ, "PATH": f"{own}:{os.environ['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def run_uv(uv: Path, name: str, words: Sequence[str | Path]) -> None:
    """Run a command of uv that may download packages; errors are those of `install_environment`."""
    result = subprocess.run([uv, "--quiet", *words], capture_output=True, text=True, check=False)
    if result.returncode and os.environ.get("CI"):
        raise RuntimeError(f"{name} must be installed, got: {result.stderr[-1000:]}")
    if result.returncode:
        pytest.skip(f"needs {name}, which cannot be installed: {result.stderr[-300:]}")


def build_go_program(package: str, version: str) -> Path:
    """Return a Go program; its first build takes a minute or two.

    Args:
        package: its module; the program has the name of its last part that is not a version.
        version: of the module.

    Raises:
        Skipped: Go is missing, or the modules cannot be downloaded; the latter not on CI.
        RuntimeError: the modules cannot be downloaded, on CI.
    """
    name = [part for part in package.split("/") if not part[1:].isdigit()][-1]
    if shutil.which("go") is None:
        pytest.skip(f"needs Go to build {name}, and there is none on PATH")
    folder = cache_folder() / f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _build_go_program(folder, name, f"{package}@{version}")
    return folder / name


def _build_go_program(folder: Path, name: str, module: str) -> None:
    """Build in a temporary folder, then rename atomically."""
    unfinished = folder / "unfinished"
    environment = {
        **os.environ,
        "GOBIN": str(unfinished),
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
    }
    result = subprocess.run(
        ["go", "install", module],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = " ".join(result.stderr.split())[-1000:]
    if result.returncode != 0 and os.environ.get("CI"):
        raise RuntimeError(f"{name} must build, got: {errors}")
    if result.returncode != 0:
        pytest.skip(f"needs the Go modules of {name}: {errors}")
    (unfinished / name).replace(folder / name)


def install_npm_packages(name: str, source: Path) -> Path:
    """Install the packages of a `package-lock.json`; return the folder of their programs.

    Args:
        name: of the package that is used, in messages and in the cache.
        source: folder with `package.json` and `package-lock.json`.

    Raises:
        Skipped: npm is missing, or the packages cannot be downloaded; the latter not on CI.
        RuntimeError: the packages cannot be downloaded, on CI.
    """
    if shutil.which("npm") is None:
        pytest.skip(f"needs npm to install {name}, and there is none on PATH")
    lock = source / "package-lock.json"
    folder = cache_folder() / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            for file in ("package.json", lock.name):
                shutil.copy(source / file, folder)
            words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
            if result.returncode and os.environ.get("CI"):
                raise RuntimeError(f"{name} must be installed, got: {result.stderr[-1000:]}")
            if result.returncode:
                pytest.skip(f"needs {name}, which cannot be installed: {result.stderr[-300:]}")
            (folder / "installed").touch()
    return folder / "node_modules" / ".bin"
