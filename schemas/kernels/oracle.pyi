"""The functions of `oracle.cpp`; see the classes and functions of `schemas.oracle.next_uses`."""

import numpy as np
from numpy.typing import NDArray

class FirstUseNumbering:
    """Numbers rows in order of first use, as their lists arrive in training order.

    Attributes:
        count: rows that have numbers; less than 2**31.
    """

    def __init__(self, low: int = 0, size: int | None = None) -> None:
        """Number nothing yet.

        Args:
            low: smallest row.
            size: number of possible rows, for which there is an array of 4 bytes each. None
                requires 32 to 64 bytes for each row that is used.
        """

    @property
    def count(self) -> int: ...
    def number(
        self, rows: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Number the rows of consecutive lists.

        Args:
            rows: flat, distinct in each list.
            offsets: of the lists.

        Returns:
            The number of each row; the new rows, in order of their numbers; and the offsets of
            those of each list.
        """

def sorted_gaps(
    numbers: NDArray[np.int32], offsets: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """Return the gaps of lists of distinct numbers in [0, size), in any order."""

def lower_steps(
    gaps: NDArray[np.int64],
    offsets: NDArray[np.int64],
    step_of_list: NDArray[np.int32],
    steps: NDArray[np.int32],
) -> None:
    """Lower the step of each number to the least one of the lists of gaps that have it."""

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
