"""Compile kernels with the machine's own compiler, once per source, machine and torch.

A library calls no function of torch or Python: it is handed addresses through
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from trainer.kernels.compiled import CompiledKernels
from trainer.kernels.contract import Interactions, Kernels
from trainer.kernels.interaction import CompiledInteractions, TorchInteractions
from trainer.kernels.operators import TorchKernels

logger = logging.getLogger(__name__)

COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
"""Sums keep their order: no flag that lets the compiler change it."""


@dataclass(frozen=True, slots=True)
class Library:
    """What one library is made of.

    Attributes:
        sources: files beside this one; the first is compiled, the others are its headers.
        flags: beside `FLAGS`.
    """

    sources: tuple[str, ...]
    flags: tuple[str, ...]


EMBEDDING = Library(("embedding.cpp", "rows.h", "rules.h", "transpose.h"), ("-ffp-contract=off",))
"""Each product is rounded: bits of rows do not depend on the machine's instructions."""
INTERACTION = Library(("interaction.cpp", "rows.h"), ("-ffp-contract=fast",))
"""Products are fused into sums, as torch's own matrix products do."""


@cache
def kernels_of(name: str) -> Kernels:
    """Return the kernel of `train.kernels`, built on first use.

    Args:
        name: `compiled`, or `torch` for torch operators alone.
    """
    made = None if name == "torch" else _made(EMBEDDING)
    return TorchKernels() if made is None else CompiledKernels(made)


@cache
def interactions_of(name: str) -> Interactions:
    """Return what multiplies vectors, by `train.kernels`, built on first use.

    Args:
        name: `compiled`, or `torch` for torch operators alone.
    """
    made = None if name == "torch" else _made(INTERACTION)
    return TorchInteractions() if made is None else CompiledInteractions(made)


def _made(what: Library) -> Path | None:
    """Return a library, None where it cannot be made: stderr then says why."""
    try:
        return library(cache_folder(), COMPILERS, what)
    except (OSError, subprocess.CalledProcessError) as error:
        _say_once(_reason(error))
        return None


@cache
def _say_once(reason: str) -> None:
    logger.warning(
        "kernel must be compiled, got %s; slower torch operators are used, "
        "install g++, or set train.kernels to torch",
        reason,
    )


def forget() -> None:
    """Ask for every kernel anew, as a new process would."""
    for answer in (kernels_of, interactions_of, _say_once):
        answer.cache_clear()


def cache_folder() -> Path:
    """Return where compiled libraries are kept, as XDG says."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "presage" / "kernels"


def library(folder: Path, compilers: tuple[str, ...], what: Library = EMBEDDING) -> Path:
    """Return a compiled library, made now if it is not in `folder`.

    Several processes may build at once: each writes its own file, and the last to rename it wins.

    Args:
        folder: of earlier builds; a fresh temporary one is used when it cannot be written.
        compilers: names to look for, in order.
        what: is compiled.

    Raises:
        OSError: no compiler is found.
        CalledProcessError: the compiler refuses.
    """
    path = folder / f"{_key(what)}.so"
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
    source = Path(__file__).with_name(what.sources[0])
    try:
        subprocess.run(
            [compiler, *FLAGS, *what.flags, "-o", str(made), str(source)],
            check=True,
            capture_output=True,
            text=True,
        )
        made.replace(path)
    finally:
        if path.parent != building:
            shutil.rmtree(building)
    return path


def _key(what: Library) -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for name in what.sources:
        digest.update(Path(__file__).with_name(name).read_bytes())
    digest.update(" ".join((*FLAGS, *what.flags)).encode())
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
