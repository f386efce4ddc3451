"""Which of some rows each sample has, and back: an index and its transpose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.lookup import Transpose, transpose


@dataclass(frozen=True, slots=True)
class Inverse:
    """From samples to the unique tuples of one group, and back.

    Attributes:
        indices: (num_samples,) int64, the tuple of each sample.
        order: (num_samples,) int32, samples sorted by their tuple, in batch order within one.
        offsets: (num_unique + 1,) int32, where each tuple's samples lie in `order`.
    """

    indices: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor

    @property
    def first_samples(self) -> torch.Tensor:
        """The sample that stands for each tuple; one without samples borrows the next one's."""
        return self.order[self.offsets[:-1].clamp(max=len(self.order) - 1)]

    def once(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return (num_unique, width) values that all samples of a tuple have; None if they differ.

        Args:
            values: (num_samples, width).
        """
        found = values[self.first_samples]
        return found if torch.equal(found[self.indices], values) else None


def inverse_of(
    indices: NDArray[np.int64], num_rows: int, transpose: Transpose = transpose
) -> Inverse:
    """Return an index with its transpose.

    Args:
        indices: (n,) in [0, num_rows).
        num_rows: that may be had.
        transpose: how they are sorted.

    Example:
        >>> inverse_of(np.array([2, 0, 2]), 3).order.tolist()
        [1, 0, 2]
    """
    _, _, order, _ = transpose(indices)
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(indices, minlength=num_rows), out=offsets[1:])
    return Inverse(
        torch.from_numpy(indices),
        torch.from_numpy(order.astype(np.int32, copy=False)),
        torch.from_numpy(offsets),
    )
