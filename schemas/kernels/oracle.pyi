"""The functions of `oracle.cpp`; see the classes and functions of `schemas.oracle`."""

import numpy as np
from numpy.typing import NDArray

_Numbered = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]

def number_in_range(
    rows: NDArray[np.int64],
    offsets: NDArray[np.int64],
    low: int,
    slots: NDArray[np.int32],
    count: int,
    position: int,
    last: NDArray[np.int32],
) -> _Numbered:
    """Number the rows of lists by first use.

    Args:
        rows: flat rows.
        offsets: of the lists.
        low: smallest possible row.
        slots: of each possible row its number and 1, or 0; changed.
        count: rows that have numbers.
        position: of the first list.
        last: for each number the position of the last list with it; changed. As long as numbers can
            be.

    Returns:
        The number of each row; the new rows, in order of their numbers; and how many of them are in
        each list.
    """

def number_hashed(
    rows: NDArray[np.int64],
    offsets: NDArray[np.int64],
    slots: NDArray[np.int64],
    count: int,
    position: int,
    last: NDArray[np.int32],
) -> _Numbered:
    """Number any rows like `number_in_range`.

    `slots` is a hash table of a power of two of pairs (row, number and 1), flat, with more pairs
    than rows will have numbers; changed.
    """

def rehash(slots: NDArray[np.int64], larger: NDArray[np.int64]) -> None:
    """Insert the pairs of a hash table into a larger one."""

def sorted_gaps(
    numbers: NDArray[np.int32], offsets: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """Return the gaps of lists of distinct numbers in [0, size), in any order."""

def link_steps(
    gaps: NDArray[np.int32],
    offsets: NDArray[np.int64],
    lists_of_steps: NDArray[np.int64],
    first_step: int,
    low: int,
    first: NDArray[np.int32],
    last: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Link steps to the next uses of their numbers, from the last to the first.

    Args:
        gaps: flat gaps of lists.
        offsets: of the lists.
        lists_of_steps: first list of each step, and the number of lists.
        first_step: number of the first step.
        low: smallest number; others outside the arrays that follow are left out.
        first: for each number the step of its first use among later steps, or 0; changed.
        last: the same for the last use; changed.

    Returns:
        The distances of all steps, and how many each has.
    """
