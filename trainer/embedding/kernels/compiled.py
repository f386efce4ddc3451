"""The kernels in C++: built with the package or on first use, called through ctypes.

The libraries call no function of torch or Python: they receive addresses, so that one call of the
compiler builds them, without headers or a build system. OpenMP is the copy that torch has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from schemas.kernels.build import Library, find_library, warn_once
from trainer.data.lookup import Inverse
from trainer.embedding.kernels.interface import (
    FeatureBags,
    GroupSamples,
    Interactions,
    Kernels,
    RowRule,
    RowSums,
    TableRows,
    VectorGradients,
    Vectors,
)
from trainer.embedding.kernels.torch_ops import TorchInteractions, TorchKernels

_RULES = {"sum": 0, "sgd": 1, "adagrad": 2, "rowwise_adagrad": 3, "adam": 4}
"""Enum `Kind` of `rules.h`."""
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
_WORD, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ENTRIES = {
    "pool": (_POINTER, _WORD, _WORD, _WORD, _WORD, _POINTER, _WORD),
    "segment_sum": (_POINTER, _WORD, _WORD, _WORD, _POINTER, _POINTER, _WORD),
    "update": (
        *(_POINTER, _WORD, _POINTER, _POINTER, _WORD, _WORD, _WORD),
        *(_POINTER, _WORD, _POINTER, _WORD),
    ),
    "merge": (*(_POINTER, _POINTER, _WORD) * 2, _WORD, _POINTER, _POINTER),
}
_WITHOUT = "slower torch operators are used, install g++, or set train.kernels to torch"
_FOLDER = Path(__file__).parent
_FLAGS = ("-fno-math-errno", "-fopenmp")
"""No flag lets the compiler reorder sums."""
EMBEDDING = Library(
    _FOLDER,
    ("embedding.cpp", "rows.h", "rules.h"),
    (*_FLAGS, "-ffp-contract=off"),
    torch.__version__,
)
"""Each product is rounded: the bits of rows do not depend on the processor."""
INTERACTION = Library(
    _FOLDER, ("interaction.cpp", "rows.h"), (*_FLAGS, "-ffp-contract=fast"), torch.__version__
)
"""Products are fused into sums, as in torch's matrix products."""


@cache
def kernels_of(name: str) -> Kernels:
    """Return the kernels of `train.kernels`, built on first use.

    Args:
        name: `compiled`, or `torch` for torch operators alone.
    """
    path = None if name == "torch" else find_library(EMBEDDING, _WITHOUT)
    return TorchKernels() if path is None else CompiledKernels(path)


@cache
def interactions_of(name: str) -> Interactions:
    """Return the interaction kernels of `train.kernels`, built on first use.

    Args:
        name: `compiled`, or `torch` for torch operators alone.
    """
    path = None if name == "torch" else find_library(INTERACTION, _WITHOUT)
    return TorchInteractions() if path is None else CompiledInteractions(path)


def clear_cached_kernels() -> None:
    """Build or load every kernel again on its next use, as in a new process."""
    for function in (kernels_of, interactions_of, warn_once):
        function.cache_clear()


class _Rule(ctypes.Structure):
    _fields_ = (
        ("kind", _WORD),
        ("learning_rate", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
    )


class CompiledKernels:
    """Calls a compiled library on as many threads as torch uses."""

    def __init__(self, library: Path) -> None:
        """Load the library, whose threads are those of torch's OpenMP."""
        loaded = ctypes.CDLL(str(library))
        self._entries = {
            (name, dtype): getattr(loaded, f"presage_{name}_{suffix}")
            for name in _ENTRIES
            for dtype, suffix in _DTYPES.items()
        }
        for (name, _), entry in self._entries.items():
            entry.argtypes, entry.restype = _ENTRIES[name], _WORD if name == "merge" else None

    def pool(
        self, features: Sequence[FeatureBags], out: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """Write the sum or mean of each bag's rows to all samples of the bag."""
        num_samples, stride, dim = out.shape
        structs = [
            (
                _address(f.rows.values, out.dtype),
                _address(f.rows.positions),
                _address(f.positions),
                _address(f.offsets),
                _address(f.per_sample_weights, out.dtype),
                _address(f.order),
                _address(f.sample_offsets),
                0 if scales is None else _address(scales[f.first_vector :], out.dtype),
                f.vector_stride,
                len(f.offsets) - 1,
                f.column,
            )
            for f in features
        ]
        self._call("pool", out, structs, dim, num_samples, stride, _address(out, out.dtype))

    def segment_sum(
        self, groups: Sequence[GroupSamples], gradient: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sum the gradients of the samples of each bag."""
        _, stride, dim = gradient.shape
        structs = [
            (
                _address(g.order),
                _address(g.sample_offsets),
                len(g.sample_offsets) - 1,
                g.column,
                g.num_features,
                g.first_vector,
            )
            for g in groups
        ]
        addresses = _address(gradient, out.dtype), _address(out, out.dtype)
        self._call("segment_sum", out, structs, dim, stride, *addresses)

    def update(
        self, tables: Sequence[TableRows], gradients: VectorGradients, rule: RowRule
    ) -> None:
        """Sum the gradients of each row over its readers, in order, and update it."""
        dtype = gradients.outputs.dtype
        structs = [
            (
                _address(t.rows.values, dtype),
                _address(t.rows.state, dtype),
                _address(t.rows.positions),
                _address(t.readers),
                _address(t.reader_offsets),
                _address(t.per_sample_weights, dtype),
                _address(t.extra_gradient, dtype),
                len(t.reader_offsets) - 1,
            )
            for t in tables
        ]
        _, stride, dim = gradients.outputs.shape
        c_rule = _Rule(_RULES[rule.name], rule.learning_rate, rule.eps, rule.beta1, rule.beta2)
        self._call(
            "update",
            gradients.outputs,
            structs,
            _address(gradients.outputs, dtype),
            _address(gradients.bags, dtype),
            gradients.num_outputs,
            gradients.num_features,
            stride,
            _address(gradients.scales, dtype),
            dim,
            ctypes.addressof(c_rule),
        )

    def merge(self, left: RowSums, right: RowSums) -> RowSums:
        """Return the union of rows; for a row of both, left plus right."""
        capacity, dtype = len(left.rows) + len(right.rows), left.sums.dtype
        rows = left.rows.new_empty(capacity)
        sums = left.sums.new_empty(capacity, left.sums.shape[1])
        count = self._entries["merge", dtype](
            _address(left.rows),
            _address(left.sums, dtype),
            len(left.rows),
            _address(right.rows),
            _address(right.sums, dtype),
            len(right.rows),
            sums.shape[1],
            rows.data_ptr(),
            sums.data_ptr(),
        )
        return RowSums(rows[:count], sums[:count])

    def _call(
        self, name: str, like: torch.Tensor, structs: Sequence[tuple[int, ...]], *arguments: int
    ) -> None:
        """Call an entry with an array of C structs of 64-bit words."""
        words = np.array(structs, np.int64)
        entry = self._entries[name, like.dtype]
        entry(words.ctypes.data, len(structs), *arguments, torch.get_num_threads())


class CompiledInteractions:
    """Calls `interaction.cpp` on as many threads as torch uses."""

    def __init__(self, library: Path) -> None:
        """Load the library, whose threads are those of torch's OpenMP."""
        loaded = ctypes.CDLL(str(library))
        rest = (_WORD, _POINTER, _POINTER, _WORD, _WORD)
        self._forward = {t: loaded[f"presage_interact_{name}"] for t, name in _DTYPES.items()}
        self._back = {t: loaded[f"presage_interact_back_{name}"] for t, name in _DTYPES.items()}
        for entries, blocks in ((self._forward, 2), (self._back, 4)):
            for entry in entries.values():
                entry.argtypes, entry.restype = (*[_POINTER] * blocks, *rest), None

    def interact(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        row_out: torch.Tensor,
        own_out: torch.Tensor,
    ) -> None:
        """Write the products of two vectors of a row, and of a sample and its row."""
        blocks = _struct(rows, row_out), _struct(own, own_out)
        _interact(self._forward[row_out.dtype], blocks, inverse, rows.rest.shape[2])

    def interact_back(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        gradients: tuple[torch.Tensor, torch.Tensor],
        out: tuple[Vectors, Vectors],
    ) -> None:
        """Write the gradients of all vectors."""
        of_rows, of_own = gradients
        blocks = (
            _struct(rows, of_rows),
            _struct(own, of_own),
            _struct(out[0], of_rows),
            _struct(out[1], of_own),
        )
        _interact(self._back[of_rows.dtype], blocks, inverse, rows.rest.shape[2])


def _struct(vectors: Vectors, out: torch.Tensor) -> np.ndarray:
    """Return the struct `Vectors` of interaction.cpp."""
    return np.array(
        [
            0 if vectors.first is None else _address(vectors.first, out.dtype),
            _address(vectors.rest, out.dtype),
            _address(out, out.dtype),
            vectors.rest.shape[1],
            out.shape[1],
        ],
        np.int64,
    )


def _interact(entry: ctypes._FuncPointer, blocks: tuple, inverse: Inverse, dim: int) -> None:
    entry(
        *(block.ctypes.data for block in blocks),
        inverse.num_unique,
        _address(inverse.order, torch.int32),
        _address(inverse.offsets, torch.int32),
        dim,
        torch.get_num_threads(),
    )


def _address(tensor: torch.Tensor | None, dtype: torch.dtype = torch.int32) -> int:
    """Return the address of a tensor, 0 for None."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "the library reads contiguous tensors"
    assert tensor.dtype is dtype, f"the library reads {dtype} here, got {tensor.dtype}"
    return tensor.data_ptr()
