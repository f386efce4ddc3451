"""Flink and Beam's Flink runner as jars, brought once into a cache outside the source tree."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
POM = HERE / "pom.xml"
REQUIREMENTS = HERE / "requirements.txt"
MAIN_CLASS = "org.apache.beam.runners.flink.FlinkJobServerDriver"
FLINK_JARS = ("flink-dist-", "log4j-")
"""Of Flink's lib/; the rest is its SQL, which Beam does not use."""

PACKAGES = (
    *("java.io", "java.lang", "java.lang.reflect", "java.net", "java.nio", "java.text"),
    *("java.time", "java.util", "java.util.concurrent", "java.util.concurrent.atomic"),
    *("java.util.concurrent.locks", "sun.nio.ch"),
)
"""What Flink 1.19 reflects on (its `env.java.opts.all`); Java 17 hides them by default."""


def cache_directory() -> Path:
    """Return where the jars of these versions belong, whether they are there or not."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    digest = hashlib.sha256(POM.read_bytes() + REQUIREMENTS.read_bytes()).hexdigest()
    return Path(home) / "presage" / "flink" / digest[:12]


def missing_tools() -> list[str]:
    """Return the programs that are needed and not on the path."""
    return [name for name in ("java", "javac", "mvn") if shutil.which(name) is None]


def fetch(say: Callable[[str], None]) -> Path:
    """Return the jar that starts Flink and the job server, fetching what is not cached.

    Two processes that ask at once fetch once. What is there is whole: a fetch that dies leaves
    nothing under the final name.

    Args:
        say: told what takes long.

    Raises:
        RuntimeError: a tool is missing, or Maven or pip fails.
    """
    final = cache_directory()
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            partial = final.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            say(f"fetching Flink and Beam's Flink runner into {final}")
            _fetch_beam(partial / "beam")
            _fetch_flink(partial / "flink")
            _write_starter(partial)
            partial.rename(final)
    return final / "flink.jar"


def _fetch_beam(directory: Path) -> None:
    command = ["mvn", "--quiet", "--batch-mode", "--strict-checksums", "--file", str(POM)]
    command += ["-Dmaven.wagon.http.retryHandler.count=3"]  # a mirror may close a connection
    _run([*command, "dependency:copy-dependencies", f"-DoutputDirectory={directory}"])


def _fetch_flink(directory: Path) -> None:
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--require-hashes", "--requirement", str(REQUIREMENTS)]
    _run([*command, "--dest", str(directory)])
    archive = next(directory.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name)
            if path.parent.name == "lib" and path.name.startswith(FLINK_JARS):
                content = tar.extractfile(member)  # `extract` has no filter before Python 3.11.4
                assert content is not None, f"{member.name} must be a file"
                with (directory / path.name).open("wb") as file:
                    shutil.copyfileobj(content, file)
    archive.unlink()


def _write_starter(directory: Path) -> None:
    """Write a jar that names the others, so that one path is the whole class path."""
    jars = (p.relative_to(directory).as_posix() for p in sorted(directory.rglob("*.jar")))
    with zipfile.ZipFile(directory / "flink.jar", "w") as jar:
        jar.writestr("META-INF/MANIFEST.MF", manifest(jars))


def manifest(jars: Iterable[str]) -> str:
    """Return the manifest of a jar that only names others, in lines of at most 72 bytes.

    Args:
        jars: paths relative to the jar's own directory.
    """
    entries = {
        "Manifest-Version": "1.0",
        "Main-Class": MAIN_CLASS,
        "Add-Opens": " ".join(f"java.base/{package}" for package in PACKAGES),
        "Class-Path": " ".join(jars),
    }
    lines: list[str] = []
    for name, value in entries.items():
        rest = f"{name}: {value}"
        lines.append(rest[:72])
        lines += [" " + rest[i : i + 71] for i in range(72, len(rest), 71)]
    return "\r\n".join(lines) + "\r\n\r\n"


def _run(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"{command[0]} must be on PATH, got none; install Java 17 and Maven")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise RuntimeError(
            f"{Path(command[0]).name} must succeed, got exit code {done.returncode}: {said[-1]}"
        )
