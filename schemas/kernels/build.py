"""Compiled kernels: C++ libraries, built with the package or on first use in a source tree.

A library calls no function of Python: it receives addresses through ctypes, so that one call of the
compiler builds it, without headers or a build system, and other threads run while it works.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}
"""Instruction-set levels that `CMakeLists.txt` builds for, highest first, and what each needs."""


@dataclass(frozen=True, slots=True)
class Library:
    """Sources and flags of one library.

    Attributes:
        folder: of the sources.
        sources: names of files; the first is compiled, the others are its headers.
        flags: in addition to `FLAGS`.
        version: of other code that the library depends on, part of the key of its cached file.
    """

    folder: Path
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    version: str = ""


def find_library(library: Library, without: str) -> Path | None:
    """Return the file of a library, built if necessary; None, and a warning, if it cannot be built.

    Args:
        library: to find.
        without: what is used instead and the way out, for the warning.
    """
    if (installed := installed_library(library)) is not None:
        return installed
    try:
        return build_library(cache_folder(), COMPILERS, library)
    except (OSError, subprocess.CalledProcessError) as error:
        warn_once(_reason(error), without)
        return None


def installed_library(library: Library) -> Path | None:
    """Return the library that was built when the package was installed, None in a source tree."""
    name = Path(library.sources[0]).stem
    if not any(library.folder.glob(f"{name}-*.so")):
        return None
    features = set(_processor_features().split())
    level = next((name for name, needs in _LEVELS.items() if needs <= features), "generic")
    path = library.folder / f"{name}-{level}.so"
    return path if path.is_file() else None


@cache
def warn_once(reason: str, without: str) -> None:
    """Log that kernels cannot be compiled, once for each reason."""
    logger.warning("kernels cannot be compiled: %s; %s", reason, without)


def cache_folder() -> Path:
    """Return the folder of compiled libraries in the XDG cache directory."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "presage" / "kernels"


def build_library(folder: Path, compilers: tuple[str, ...], library: Library) -> Path:
    """Return a compiled library, built if it is not in `folder`.

    Several processes may build at once: each writes its own file and renames it.

    Args:
        folder: of earlier builds; a new temporary one is used if it is not writable.
        compilers: names to look for, in order.
        library: to build.

    Raises:
        OSError: no compiler is found.
        CalledProcessError: the compiler fails.
    """
    path = folder / f"{_key(library)}.so"
    if path.is_file():
        return path
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise FileNotFoundError(f"no compiler among {', '.join(compilers)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder))
    except OSError:
        temporary = Path(tempfile.mkdtemp())
        path = temporary / path.name
    built = temporary / "building.so"
    source = library.folder / library.sources[0]
    try:
        subprocess.run(
            [compiler, *FLAGS, *library.flags, "-o", str(built), str(source)],
            check=True,
            capture_output=True,
            text=True,
        )
        built.replace(path)
    finally:
        if path.parent != temporary:
            shutil.rmtree(temporary)
    return path


def _key(library: Library) -> str:
    digest = hashlib.sha256(library.version.encode())
    for name in library.sources:
        digest.update((library.folder / name).read_bytes())
    digest.update(" ".join((*FLAGS, *library.flags)).encode())
    digest.update(_processor_features().encode())
    return digest.hexdigest()[:32]


def _processor_features() -> str:
    """Return the input of `-march=native`, since machines may share a cache folder."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return ""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    names = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join(dict.fromkeys(x for x in lines if x.split("\t")[0].strip() in names))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines() or ["no message"]
        return next((line for line in lines if "error" in line), lines[0])
    return str(error)
