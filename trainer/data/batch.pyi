"""The functions of `batch.cpp`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Lists = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]

class ListColumns:
    """The lists of all features in one row group and the weights of their values."""

    def __init__(self, bags: list[_Lists], weights: list[_Lists | None]) -> None:
        """Check the arrays.

        Args:
            bags: by feature values of any integer type, starts and ends.
            weights: by feature those of the weights of its values; None without weights.
        """

def concat_lists(
    ranges: Sequence[tuple[ListColumns, Sequence[NDArray[np.int64] | None], NDArray[np.int64]]],
    owner_of: NDArray[np.int64],
    weight_bits: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Return the lengths, offsets and values of the lists of all features, and their weights.

    Args:
        ranges: of each row group its lists; by owner of features the indices of lists, None for all
            of them in order; by owner
            the range of lists, or of indices, flat.
        owner_of: of each feature.
        weight_bits: of a weight, 0 without weights; the weights that a row group does not have are
            1.
    """

def invert(
    rows: NDArray[np.int64], num_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Return the stable order of rows and the offsets of each; None if one is out of range."""

def distinct_positions(
    values: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the ascending distinct values and the position of each value in them."""

def table_lookups(
    values: NDArray[np.int64],
    offsets: NDArray[np.int64],
    weights: NDArray[Any] | None,
    bags: NDArray[np.int64],
    features_of_tables: NDArray[np.int64],
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[Any],
    NDArray[Any],
]:
    """Return the arrays of the `TableLookup` of each table, one table after the other.

    Args:
        values: rows of all look-ups, not negative.
        offsets: of all bags in `values`.
        weights: of all look-ups; None for ones.
        bags: of each feature the first bag, their number, its first vector and the stride of
            vectors, flat.
        features_of_tables: how many features each table has in turn.

    Returns:
        The number of rows and the longest bag of each table; rows; positions; offsets of bags;
        readers; offsets of readers;
        weights in the order of look-ups, and of readers.
    """

def shared_rows(
    groups: Sequence[tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], int]],
    num_features: int,
    num_samples: int,
    dense: NDArray[Any],
) -> tuple[list[int], bool, NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Choose the groups of `presage.trainer.data.shared.find_shared_features`.

    Args:
        groups: of each the tuple of each sample, samples by tuple, offsets of each tuple's; and its
            features.
        num_features: sparse features, with and without a group.
        num_samples: of the batch.
        dense: float32 or float64, as many of each sample, flat.

    Returns:
        Indices of the groups in the order of choice, whether dense features are equal within each
        shared row; the row of each
        sample, the order of samples by row, its offsets.
    """
