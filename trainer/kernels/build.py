"""Compile the kernel with the machine's own compiler, once per source, machine and torch.

The library calls no function of torch or Python: it is handed addresses through
ctypes, so one call of the compiler makes it, without headers or a build system.
OpenMP is the one that torch has loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from trainer.kernels.compiled import CompiledKernels
from trainer.kernels.contract import Kernels
from trainer.kernels.operators import TorchKernels

logger = logging.getLogger(__name__)

SOURCES = ("embedding.cpp", "rows.h", "rules.h", "transpose.h")
"""Files of the library beside this one; the first is compiled, the others are its headers."""
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
"""Sums keep their order: no flag that lets the compiler change it."""
EXACT = ("-ffp-contract=off",)
"""Each product is rounded, so that bits do not depend on the machine's instructions."""


@cache
def kernels_of(name: str) -> Kernels:
    """Return the kernel of `train.kernels`, built on first use.

    Args:
        name: `compiled`, or `torch` for torch operators alone.
    """
    if name == "torch":
        return TorchKernels()
    try:
        return CompiledKernels(library(cache_folder(), COMPILERS))
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning(
            "kernel must be compiled, got %s; slower torch operators are used, "
            "install g++, or set train.kernels to torch",
            _reason(error),
        )
        return TorchKernels()


def cache_folder() -> Path:
    """Return where compiled libraries are kept, as XDG says."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "presage" / "kernels"


def library(folder: Path, compilers: tuple[str, ...]) -> Path:
    """Return the compiled library, made now if it is not in `folder`.

    Several processes may build at once: each writes its own file, and the last to rename it wins.

    Args:
        folder: of earlier builds; a fresh temporary one is used when it cannot be written.
        compilers: names to look for, in order.

    Raises:
        OSError: no compiler is found.
        CalledProcessError: the compiler refuses.
    """
    path = folder / f"{_key()}.so"
    if path.is_file():
        return path
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise FileNotFoundError(f"no compiler among {', '.join(compilers)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder))
    except OSError:
        building = Path(tempfile.mkdtemp())
        path = building / path.name
    made = building / "building.so"
    source = Path(__file__).with_name(SOURCES[0])
    try:
        subprocess.run(
            [compiler, *FLAGS, *EXACT, "-o", str(made), str(source)],
            check=True,
            capture_output=True,
            text=True,
        )
        made.replace(path)
    finally:
        if path.parent != building:
            shutil.rmtree(building)
    return path


def _key() -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    digest.update(" ".join((*FLAGS, *EXACT)).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Return what `-march=native` depends on: a cache folder may be shared by machines."""
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
