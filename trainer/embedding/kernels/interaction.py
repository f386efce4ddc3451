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
        _call(self._forward[row_out.dtype], blocks, inverse, rows.rest.shape[2])

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
        _call(self._back[of_rows.dtype], blocks, inverse, rows.rest.shape[2])


class TorchInteractions:
    """Batched matrix products, with a copy of its row for each sample."""

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
        out: tuple[Vectors, Vectors],
    ) -> None:
        """Write the gradients of all vectors."""
        x, v = _all(rows), _all(own)
        crossed = gradients[1][:, own.own_width :].reshape(-1, own.count, rows.count)
        of_rows, of_own = _back(rows, x, gradients[0]), _back(own, v, gradients[1])
        of_own += torch.bmm(crossed, x[inverse.indices])
        of_rows.index_add_(0, inverse.indices, torch.bmm(crossed.transpose(1, 2), v))
        for vectors, gradient in zip(out, (of_rows, of_own), strict=True):
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
    of_pairs = block.new_zeros(len(block), count, count)
    of_pairs[:, a, b] = of_pairs[:, b, a] = gradient[:, start : vectors.own_width]
    of_vectors = torch.bmm(of_pairs, block)
    if vectors.first is not None:
        of_vectors[:, 0] += gradient[:, :dim]
    return of_vectors


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


def _call(entry: ctypes._FuncPointer, blocks: tuple, inverse: Inverse, dim: int) -> None:
    entry(
        *(block.ctypes.data for block in blocks),
        len(inverse.offsets) - 1,
        _address(inverse.order, torch.int32),
        _address(inverse.offsets, torch.int32),
        dim,
        torch.get_num_threads(),
    )


def _address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    assert tensor.is_contiguous(), "the library reads contiguous tensors"
    assert tensor.dtype is dtype, f"the library reads {dtype} here, got {tensor.dtype}"
    return tensor.data_ptr()
