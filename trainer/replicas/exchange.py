"""Partial sums as one message: without row ids, for all replicas have the rows of a step.

    int64     number of nodes
    per node  int64 level, number, rows; float64 loss, weight
    per node  dense gradient; a bit per row of the step; the sums of the rows whose bit is set

Each piece begins at a multiple of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trainer.kernels.contract import RowSums
from trainer.leaf_work import Partial
from trainer.tree import Node

_HEAD, _WORD = 5, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all replicas know of a step's sums.

    Attributes:
        num_parameters: dense ones.
        num_rows: of the step, all tables together.
        dim: of a row.
        dtype: of sums.
    """

    num_parameters: int
    num_rows: int
    dim: int
    dtype: torch.dtype


def pack(held: Mapping[Node, Partial], shape: Shape) -> torch.Tensor:
    """Return sums as (n,) uint8.

    Args:
        held: sums by node of the tree.
        shape: of the step.
    """
    head = np.zeros((len(held), _HEAD), np.int64)
    pieces: list[torch.Tensor] = []
    for place, (node, value) in zip(head, held.items(), strict=True):
        place[:3] = node.level, node.number, len(value.rows.rows)
        place[3:] = np.array([value.loss, value.weight]).view(np.int64)
        bits = np.zeros(shape.num_rows, bool)
        bits[value.rows.rows.numpy()] = True
        pieces += [value.dense, torch.from_numpy(np.packbits(bits)), value.rows.sums]
    count = torch.tensor([len(held)])
    return torch.cat([_bytes(piece) for piece in (count, torch.from_numpy(head), *pieces)])


def unpack(message: torch.Tensor, shape: Shape) -> dict[Node, Partial]:
    """Return the sums of a message; they share its memory.

    Args:
        message: what `pack` returned.
        shape: of the step.

    Raises:
        ValueError: the message is of another step or model.
    """
    pieces = _Pieces(message)
    [count] = pieces.take(1, torch.int64).tolist()
    head = pieces.take(count * _HEAD, torch.int64).view(count, _HEAD).numpy()
    found: dict[Node, Partial] = {}
    for level, number, num_rows, *_ in head.tolist():
        loss, weight = head[len(found), 3:].copy().view(np.float64).tolist()
        dense = pieces.take(shape.num_parameters, shape.dtype)
        bits = pieces.take(-(-shape.num_rows // 8), torch.uint8).numpy()
        rows = np.flatnonzero(np.unpackbits(bits, count=shape.num_rows)).astype(np.int32)
        if len(rows) != num_rows:
            raise ValueError(
                f"message must have the rows of the step, got {len(rows)} bits for {num_rows} rows"
            )
        sums = pieces.take(num_rows * shape.dim, shape.dtype).view(num_rows, shape.dim)
        found[Node(level, number)] = Partial(
            loss=loss, weight=weight, dense=dense, rows=RowSums(torch.from_numpy(rows), sums)
        )
    pieces.end()
    return found


class _Pieces:
    """Cuts a message."""

    def __init__(self, message: torch.Tensor) -> None:
        self._message = message
        self._at = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        piece = self._message[self._at : self._at + size]
        if len(piece) != size:
            raise ValueError(f"message must have {self._at + size} bytes, got {len(self._message)}")
        self._at += -(-size // _WORD) * _WORD
        return piece.view(dtype)

    def end(self) -> None:
        if self._at != len(self._message):
            raise ValueError(f"message must have {self._at} bytes, got {len(self._message)}")


def _bytes(piece: torch.Tensor) -> torch.Tensor:
    flat = piece.contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % _WORD
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
