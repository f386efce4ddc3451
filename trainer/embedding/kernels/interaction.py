"""Dot products of feature pairs, in C++ and as torch operators."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

from trainer.data.lookup import Inverse
from trainer.embedding.kernels.interface import Vectors

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
_WORD, _POINTER = ctypes.c_int64, ctypes.c_void_p


class CompiledInteractions:
    """Calls `interaction.cpp`, on as many threads as torch uses."""

    def __init__(self, library: Path) -> None:
        """Load the library; torch's OpenMP, which is loaded already, runs its threads."""
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
        blocks = _words(rows, row_out), _words(own, own_out)
        _call(self._forward[row_out.dtype], blocks, inverse, rows.rest.shape[2])

    def interact_back(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        gradients: tuple[torch.Tensor, torch.Tensor],
        to: tuple[Vectors, Vectors],
    ) -> None:
        """Write the gradients of all vectors."""
        of_rows, of_own = gradients
        blocks = (
            _words(rows, of_rows),
            _words(own, of_own),
            _words(to[0], of_rows),
            _words(to[1], of_own),
        )
        _call(self._back[of_rows.dtype], blocks, inverse, rows.rest.shape[2])


class TorchInteractions:
    """Batched products in which each sample has a copy of its row."""

    def interact(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        row_out: torch.Tensor,
        own_out: torch.Tensor,
    ) -> None:
        """Write the products of two vectors of a row, and of a sample and its row."""
        x, v = _all(rows), _all(own)
        torch.cat([*_first(rows), _pairs(x)], 1, out=row_out)
        crossed = torch.bmm(v, x[inverse.indices].transpose(1, 2)).flatten(1)
        torch.cat([*_first(own), _pairs(v), crossed], 1, out=own_out)

    def interact_back(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        gradients: tuple[torch.Tensor, torch.Tensor],
        to: tuple[Vectors, Vectors],
    ) -> None:
        """Write the gradients of all vectors."""
        x, v = _all(rows), _all(own)
        crossed = gradients[1][:, own.own_width :].reshape(-1, own.count, rows.count)
        to_rows, to_own = _back(rows, x, gradients[0]), _back(own, v, gradients[1])
        to_own += torch.bmm(crossed, x[inverse.indices])
        to_rows.index_add_(0, inverse.indices, torch.bmm(crossed.transpose(1, 2), v))
        for vectors, gradient in zip(to, (to_rows, to_own), strict=True):
            if vectors.first is not None:
                vectors.first.copy_(gradient[:, 0])
            vectors.rest.copy_(gradient[:, -vectors.rest.shape[1] :])


def _all(vectors: Vectors) -> torch.Tensor:
    if vectors.first is None:
        return vectors.rest
    return torch.cat([vectors.first[:, None], vectors.rest], dim=1)


def _first(vectors: Vectors) -> list[torch.Tensor]:
    return [] if vectors.first is None else [vectors.first]


def _pairs(block: torch.Tensor) -> torch.Tensor:
    """Return (n, p) products of pairs a < b of (n, m, dim) vectors."""
    a, b = torch.triu_indices(block.shape[1], block.shape[1], offset=1)
    return torch.bmm(block, block.transpose(1, 2))[:, a, b]


def _back(vectors: Vectors, block: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of (n, m, dim) vectors from that of the first and of pairs."""
    count, dim = block.shape[1:]
    start = dim if vectors.first is not None else 0
    a, b = torch.triu_indices(count, count, offset=1)
    factors = block.new_zeros(len(block), count, count)
    factors[:, a, b] = factors[:, b, a] = gradient[:, start : vectors.own_width]
    found = torch.bmm(factors, block)
    if vectors.first is not None:
        found[:, 0] += gradient[:, :dim]
    return found


def _words(vectors: Vectors, out: torch.Tensor) -> np.ndarray:
    """Return `Vectors` of interaction.cpp."""
    return np.array(
        [
            0 if vectors.first is None else _at(vectors.first, out.dtype),
            _at(vectors.rest, out.dtype),
            _at(out, out.dtype),
            vectors.rest.shape[1],
            out.shape[1],
        ],
        np.int64,
    )


def _call(entry: ctypes._FuncPointer, blocks: tuple, inverse: Inverse, dim: int) -> None:
    entry(
        *(block.ctypes.data for block in blocks),
        len(inverse.offsets) - 1,
        _at(inverse.order, torch.int32),
        _at(inverse.offsets, torch.int32),
        dim,
        torch.get_num_threads(),
    )


def _at(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    assert tensor.is_contiguous(), "the library reads tensors without gaps"
    assert tensor.dtype is dtype, f"the library reads {dtype} here, got {tensor.dtype}"
    return tensor.data_ptr()
