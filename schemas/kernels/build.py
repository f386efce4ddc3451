"""Compiled kernels: C++ libraries, built with the package or on first use in a source tree.

A library calls no function of Python: it receives addresses through ctypes, so that one call of the
compiler builds it, without headers or a build system, and other threads run while it works.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}
"""Instruction-set levels of installed libraries, highest first, and what each needs."""


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


ARRAYS = Library(Path(__file__).parent, ("arrays.cpp", "common.h"), ("-fno-strict-aliasing",))
"""The library of `arrays.py`."""
STATISTICS = Library(
    Path(__file__).parent, ("statistics.cpp", "common.h"), ("-fno-strict-aliasing",)
)
"""The library of `statistics.py`."""
ORACLE = Library(Path(__file__).parent, ("oracle.cpp",), ("-fno-strict-aliasing",))
"""The library of `oracle.py`."""


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
    path = library.folder / f"{name}-{processor_level()}.so"
    return path if path.is_file() else None


def processor_level() -> str:
    """Return the highest level of the instruction set that libraries are built for."""
    features = set(_processor_features().split())
    return next((name for name, needs in _LEVELS.items() if needs <= features), "generic")


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
    find_compiler(compilers)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder))
    except OSError:
        temporary = Path(tempfile.mkdtemp())
        path = temporary / path.name
    built = temporary / "building.so"
    try:
        _compile(library, ("-march=native",), built, compilers)
        built.replace(path)
    finally:
        if path.parent != temporary:
            shutil.rmtree(temporary)
    return path


def build_levels(library: Library) -> list[Path]:
    """Build a library beside its sources for each level of this kind of processor; for images.

    Raises:
        OSError: no compiler is found.
        CalledProcessError: the compiler fails.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    flags = {level: (f"-march={level}",) for level in _LEVELS} if is_x86 else {"generic": ()}
    name = Path(library.sources[0]).stem
    paths = {level: library.folder / f"{name}-{level}.so" for level in flags}
    for level, path in paths.items():
        _compile(library, flags[level], path, COMPILERS)
    return list(paths.values())


def find_compiler(compilers: tuple[str, ...]) -> str:
    """Return the path of the first compiler that is installed.

    Raises:
        FileNotFoundError: none is.
    """
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise FileNotFoundError(f"no compiler among {', '.join(compilers)}")
    return compiler


def _compile(
    library: Library, flags: tuple[str, ...], path: Path, compilers: tuple[str, ...]
) -> None:
    source = str(library.folder / library.sources[0])
    words = [find_compiler(compilers), *FLAGS, *flags, *library.flags, "-o", str(path), source]
    subprocess.run(words, check=True, capture_output=True, text=True)


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


if __name__ == "__main__":  # while an image is built: its processes find no compiler
    for library in (ARRAYS, STATISTICS, ORACLE):
        build_levels(library)
