"""The kernels in C++: compiled by the machine's compiler, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.lookup import transpose
from trainer.embedding.kernels.interaction import CompiledInteractions, TorchInteractions
from trainer.embedding.kernels.interface import (
    FeatureBags,
    GroupSamples,
    Interactions,
    Kernels,
    PlaceGradients,
    RowRule,
    RowSums,
    TableRows,
    Transposed,
)
from trainer.embedding.kernels.torch_ops import TorchKernels

KINDS = {"sum": 0, "sgd": 1, "adagrad": 2, "rowwise_adagrad": 3, "adam": 4}
"""Numbers of the rules in `rules.h`."""
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
_WORD_BITS, _MOST = 64, 2**31 - 1
_WORD, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ENTRIES = {
    "pool": (_POINTER, _WORD, _WORD, _WORD, _WORD, _POINTER, _WORD),
    "contract": (_POINTER, _WORD, _WORD, _WORD, _POINTER, _POINTER, _WORD),
    "update": (
        *(_POINTER, _WORD, _POINTER, _POINTER, _WORD, _WORD, _WORD),
        *(_POINTER, _WORD, _POINTER, _WORD),
    ),
    "merge": (*(_POINTER, _POINTER, _WORD) * 2, _WORD, _POINTER, _POINTER),
}


class _Rule(ctypes.Structure):
    _fields_ = (
        ("kind", _WORD),
        ("learning_rate", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
    )


class CompiledKernels:
    """Calls the library that `build.py` made, on as many threads as torch uses."""

    def __init__(self, library: Path) -> None:
        """Load the library; torch's OpenMP, which is loaded already, runs its threads."""
        loaded = ctypes.CDLL(str(library))
        self._entries = {
            (name, dtype): getattr(loaded, f"presage_{name}_{suffix}")
            for name in _ENTRIES
            for dtype, suffix in _DTYPES.items()
        }
        for (name, _), entry in self._entries.items():
            entry.argtypes, entry.restype = _ENTRIES[name], _WORD if name == "merge" else None
        self._transpose = loaded.presage_transpose
        self._transpose.argtypes = (_POINTER, _WORD, _WORD, _WORD, *[_POINTER] * 5)
        self._transpose.restype = _WORD

    def transpose(self, values: NDArray[np.int64]) -> Transposed:
        """Sort by digits; numpy's sort where value and place do not fit one word."""
        count = len(values)
        value_bits, place_bits = int(values.max(initial=0)).bit_length(), count.bit_length()
        if value_bits + place_bits > _WORD_BITS or count > _MOST:
            return transpose(values)
        values = np.ascontiguousarray(values, np.int64)
        distinct, words = np.empty(count, np.int64), np.empty(2 * count, np.uint64)
        positions, order = np.empty(count, np.int32), np.empty(count, np.int32)
        offsets = np.empty(count + 1, np.int32)
        arrays = (distinct, positions, order, offsets, words)
        found = self._transpose(
            values.ctypes.data, count, value_bits, place_bits, *(a.ctypes.data for a in arrays)
        )
        return distinct[:found].copy(), positions, order, offsets[: found + 1].copy()

    def pool(
        self, features: Sequence[FeatureBags], out: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """Write the sum or mean of each bag's rows to all samples that have it."""
        num_samples, stride, dim = out.shape
        words = [
            (
                _at(f.rows.values, out.dtype),
                _at(f.rows.places),
                _at(f.positions),
                _at(f.offsets),
                _at(f.factors, out.dtype),
                _at(f.order),
                _at(f.sample_offsets),
                0 if scales is None else _at(scales, out.dtype) + f.place * out.itemsize,
                f.place_step,
                len(f.offsets) - 1,
                f.column,
            )
            for f in features
        ]
        self._call(
            "pool", out, _words(words), len(words), dim, num_samples, stride, _at(out, out.dtype)
        )

    def contract(
        self, groups: Sequence[GroupSamples], gradient: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sum the gradients of the samples that share a bag."""
        _, stride, dim = gradient.shape
        words = [
            (
                _at(g.order),
                _at(g.sample_offsets),
                len(g.sample_offsets) - 1,
                g.column,
                g.num_features,
                g.place,
            )
            for g in groups
        ]
        addresses = _at(gradient, out.dtype), _at(out, out.dtype)
        self._call("contract", out, _words(words), len(words), dim, stride, *addresses)

    def update(self, tables: Sequence[TableRows], gradients: PlaceGradients, rule: RowRule) -> None:
        """Sum the gradients of each row over its readers, in order, and update it."""
        dtype = gradients.outputs.dtype
        words = [
            (
                _at(t.rows.values, dtype),
                _at(t.rows.state, dtype),
                _at(t.rows.places),
                _at(t.readers),
                _at(t.reader_offsets),
                _at(t.factors, dtype),
                _at(t.more, dtype),
                len(t.reader_offsets) - 1,
            )
            for t in tables
        ]
        _, stride, dim = gradients.outputs.shape
        found = _Rule(KINDS[rule.name], rule.learning_rate, rule.eps, rule.beta1, rule.beta2)
        self._call(
            "update",
            gradients.outputs,
            _words(words),
            len(words),
            _at(gradients.outputs, dtype),
            _at(gradients.bags, dtype),
            gradients.num_outputs,
            gradients.num_features,
            stride,
            _at(gradients.scales, dtype),
            dim,
            ctypes.addressof(found),
        )

    def merge(self, left: RowSums, right: RowSums) -> RowSums:
        """Return the sums of the rows of either, left added to right where a row is in both."""
        most, dtype = len(left.rows) + len(right.rows), left.sums.dtype
        rows, sums = left.rows.new_empty(most), left.sums.new_empty(most, left.sums.shape[1])
        sides = [
            word
            for side in (left, right)
            for word in (_at(side.rows), _at(side.sums, dtype), len(side.rows))
        ]
        entry = self._entries["merge", dtype]
        found = entry(*sides, sums.shape[1], rows.data_ptr(), sums.data_ptr())
        return RowSums(rows[:found], sums[:found])

    def _call(self, name: str, like: torch.Tensor, words: np.ndarray, *rest: int) -> None:
        entry = self._entries[name, like.dtype]
        entry(words.ctypes.data, *rest, torch.get_num_threads())


def _words(rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return structs of 64-bit words, as the library reads them."""
    return np.array(rows, np.int64)


def _at(tensor: torch.Tensor | None, dtype: torch.dtype = torch.int32) -> int:
    """Return the address of a tensor, 0 for None."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "the library reads tensors without gaps"
    assert tensor.dtype is dtype, f"the library reads {dtype} here, got {tensor.dtype}"
    return tensor.data_ptr()


# Compile kernels with the machine's own compiler, once per source, machine and torch.
#
# A library calls no function of torch or Python: it is handed addresses through ctypes, so one
# call of the compiler makes it, without headers or a build system. OpenMP is the one that torch
# has loaded.

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
