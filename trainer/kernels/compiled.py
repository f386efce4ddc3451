"""The kernel in C++, called through ctypes; `embedding.cpp` states what each entry does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.kernels.contract import (
    FeatureBags,
    GroupSamples,
    PlaceGradients,
    RowRule,
    RowSums,
    TableRows,
    Transposed,
)
from trainer.lookup import transpose

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
