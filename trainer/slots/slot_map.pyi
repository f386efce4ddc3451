"""The class of `slot_map.cpp`."""

import numpy as np
from numpy.typing import NDArray

class SlotMap:
    """The slot of each row that a cache of several tables holds; 24 to 40 bytes a slot."""

    def __init__(self, starts: NDArray[np.int64]) -> None:
        """Hold no row.

        Args:
            starts: the first slot of each table, and the number of slots.
        """

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Free slots that hold a row."""

    def add(self, slots: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        """Put distinct rows that have no slot into free slots."""

    def find(
        self, values: NDArray[np.int64], offsets: NDArray[np.int64], tables: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int]:
        """Return the slot of each look-up within its table, and the first one without, or -1.

        Args:
            values: rows, look-ups of one feature after the other.
            offsets: of the look-ups of each feature.
            tables: of each feature; -1: its look-ups are returned as they are.
        """
