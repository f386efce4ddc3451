"""Calls of `batch.cpp`, on numpy arrays; None where no compiler has built it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.kernels.build import Library, find_library
from schemas.kernels.functions import POINTER, WORD, Functions

_ENTRIES = {
    "list_offsets": (POINTER, WORD, POINTER, POINTER),
    "list_values": (POINTER, WORD, WORD, POINTER),
    "invert": (POINTER, WORD, WORD, POINTER, POINTER),
    "distinct_positions": (POINTER, WORD, POINTER, POINTER),
    "table_lookups": (*(POINTER,) * 4, WORD, *(POINTER,) * 6, WORD, *(POINTER,) * 3),
    "shared_rows": (POINTER, *(WORD,) * 3, POINTER, *(WORD,) * 2, *(POINTER,) * 5),
}
BATCH = Library(
    Path(__file__).parent,
    ("batch.cpp", "../../schemas/kernels/common.h"),
    ("-fno-strict-aliasing",),
)

BagRange = tuple[int, int, int, int]
"""The first bag of a feature, their number, its first vector, and the stride of vectors."""
GroupRows = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], int]
"""Inverse indices of a group, their order and its offsets; features of the group."""


class TableArrays(NamedTuple):
    """The arrays of a `trainer.data.lookup.TableLookup`; weights are empty unless given."""

    rows: NDArray[np.int64]
    longest_bag: int
    positions: torch.Tensor
    bag_offsets: torch.Tensor
    readers: torch.Tensor
    reader_offsets: torch.Tensor
    weights: torch.Tensor
    reader_weights: torch.Tensor


@cache
def batch_kernels() -> BatchKernels | None:
    """Return the compiled kernels, built on first use; None if they cannot be built."""
    path = find_library(BATCH, "slower numpy code is used, install g++")
    return None if path is None else BatchKernels(path)


class BatchKernels(Functions):
    """The functions of `batch.cpp`."""

    def __init__(self, path: Path) -> None:
        """Load the library."""
        super().__init__(path, _ENTRIES)

    def list_offsets(self, parts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths and the offsets of all lists, one after the other.

        Args:
            parts: (..., 6): addresses of values, starts and ends; address of the indices of lists,
                0 for all of them in order; and the range of lists, or of indices.
        """
        count = int((parts[..., 5] - parts[..., 4]).sum())
        lengths, offsets = np.empty(count, np.int64), np.empty(count + 1, np.int64)
        self.call("list_offsets", np.ascontiguousarray(parts), parts.size // 6, lengths, offsets)
        return lengths, offsets

    def list_values(self, parts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Write the values of all lists; those of parts without values are left unchanged."""
        width = out.dtype.itemsize
        self.call("list_values", np.ascontiguousarray(parts), parts.size // 6, width, out)

    def invert(
        self, rows: NDArray[np.int64], num_rows: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Return the stable order of rows and the offsets of each; None if one is out of range."""
        order, offsets = np.empty(len(rows), np.int32), np.empty(num_rows + 1, np.int32)
        rows = np.ascontiguousarray(rows)
        failed = self.call("invert", rows, len(rows), num_rows, order, offsets)
        return None if failed else (order, offsets)

    def distinct_positions(
        self, values: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the ascending distinct values and the position of each value in them."""
        distinct, positions = np.empty(len(values), np.int64), np.empty(len(values), np.int32)
        count = self.call("distinct_positions", values, len(values), distinct, positions)
        return distinct[:count].copy(), positions

    def table_lookups(
        self,
        values: NDArray[np.int64],
        offsets: NDArray[np.int64],
        weights: NDArray[Any] | None,
        ranges: Sequence[Sequence[BagRange]],
    ) -> list[TableArrays]:
        """Return the look-ups of each table.

        Args:
            values: rows of all look-ups.
            offsets: of all bags in `values`.
            weights: of all look-ups, float32 or float64; None for ones.
            ranges: by table, the bags of each feature; at least one.
        """
        bags = np.array([bags for own in ranges for bags in own], np.int64)
        per_feature = offsets[bags[:, 0] + bags[:, 1]] - offsets[bags[:, 0]]
        num_features = np.array([len(own) for own in ranges], np.int64)
        starts = np.cumsum(num_features) - num_features
        num_values = np.add.reduceat(per_feature, starts)
        num_bags = np.add.reduceat(bags[:, 1], starts) + 1
        total, num_tables = int(num_values.sum()), len(ranges)
        sizes, rows = np.empty((num_tables, 2), np.int64), np.empty(total, np.int64)
        positions, readers = np.empty(total, np.int32), np.empty(total, np.int32)
        bag_offsets = np.empty(int(num_bags.sum()), np.int32)
        reader_offsets = np.empty(total + num_tables, np.int32)
        own_weights = np.empty(0) if weights is None else np.empty(total, weights.dtype)
        reader_weights = np.empty_like(own_weights)
        self.call(
            "table_lookups",
            *(values, offsets, bags, num_features, num_tables),
            *(rows, positions, bag_offsets, readers, reader_offsets, sizes),
            0 if weights is None else weights.dtype.itemsize,
            own_weights if weights is None else weights,
            own_weights,
            reader_weights,
        )
        num_rows = sizes[:, 0]
        num_weights = num_values * (weights is not None)
        columns = (
            _cut(positions, num_values),
            _cut(bag_offsets, num_bags),
            _cut(readers, num_values),
            _cut(reader_offsets[: num_rows.sum() + num_tables], num_rows + 1),
            _cut(own_weights, num_weights),
            _cut(reader_weights, num_weights),
        )
        last_rows = np.cumsum(num_rows).tolist()
        return [
            TableArrays(rows[end - count : end], longest, *tensors)
            for end, (count, longest), *tensors in zip(
                last_rows, sizes.tolist(), *columns, strict=True
            )
        ]

    def shared_rows(
        self, groups: Sequence[GroupRows], num_features: int, dense: NDArray[Any]
    ) -> tuple[list[int], bool, NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Choose the groups of `trainer.data.shared.find_shared_features`.

        Args:
            groups: at least one.
            num_features: sparse features, with and without a group.
            dense: (num_samples, num_dense) float32 or float64.

        Returns:
            Indices of the groups in the order of choice, whether dense features are equal within
            each shared row; the row of each sample, the order of samples by row, its offsets.
        """
        structs = np.array(
            [
                (i.ctypes.data, order.ctypes.data, offsets.ctypes.data, len(offsets) - 1, count)
                for i, order, offsets, count in groups
            ],
            np.int64,
        )
        num_samples, num_dense = dense.shape
        members, flag = np.empty(len(groups), np.int64), np.zeros(1, np.int64)
        rows, order = np.empty(num_samples, np.int64), np.empty(num_samples, np.int32)
        offsets = np.empty(num_samples + 2, np.int32)
        count = self.call(
            "shared_rows",
            *(structs, len(groups), num_features, num_samples),
            *(dense, num_dense, dense.dtype.itemsize, members, flag, rows, order, offsets),
        )
        num_rows = int(rows.max(initial=-1)) + 1 if count else 0
        return members[:count].tolist(), bool(flag[0]), rows, order, offsets[: num_rows + 1].copy()


def _cut(array: NDArray[Any], sizes: NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
    """Return consecutive parts of an array."""
    return torch.from_numpy(array).split_with_sizes(sizes.tolist())
