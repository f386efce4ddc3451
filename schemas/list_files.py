"""Lists over consecutive Parquet files, decoded file by file as they are asked for.

Access lists and index of a table are cut into files of some megabytes. Who goes
through them in order, in either direction, holds one at a time; who jumps keeps
as many as a shared allowance holds, and decodes the others again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from schemas.checked import CheckedFile
from schemas.jagged import Array, Jagged, offsets_of


class Kept:
    """Decoded files of several tables, those that were used last, up to an allowance."""

    def __init__(self, most_bytes: int) -> None:
        """Keep nothing yet.

        Args:
            most_bytes: of decoded values, over all tables.
        """
        self._most_bytes = most_bytes
        self._files: OrderedDict[tuple[int, int], Jagged] = OrderedDict()
        self._bytes = self._num_owners = 0

    def owner(self) -> int:
        """Return a number for one more user."""
        self._num_owners += 1
        return self._num_owners

    def find(self, owner: int, file_index: int) -> Jagged | None:
        """Return a file that is kept."""
        found = self._files.get((owner, file_index))
        if found is not None:
            self._files.move_to_end((owner, file_index))
        return found

    def keep(self, owner: int, file_index: int, lists: Jagged) -> None:
        """Keep a file; those that were not used for longest go."""
        self._files[owner, file_index] = lists
        self._bytes += lists.values.nbytes
        while self._bytes > self._most_bytes:
            _, oldest = self._files.popitem(last=False)
            self._bytes -= oldest.values.nbytes


class ListFiles:
    """The lists of one table over all its files.

    Not safe for several threads at once.
    """

    def __init__(
        self,
        files: Sequence[CheckedFile],
        decode: Callable[[CheckedFile], Jagged],
        kept: Kept | None = None,
    ) -> None:
        """Count the lists of each file; none is decoded yet.

        Args:
            files: in order.
            decode: returns the lists of a file.
            kept: allowance for files besides the one that was used last.
        """
        self._files = files
        self._decode = decode
        self._kept = Kept(0) if kept is None else kept
        self._owner = self._kept.owner()
        self._first = offsets_of(np.array(list(map(_num_rows, files)), np.int64))
        self._open = (-1, Jagged(np.empty(0, np.int64), np.zeros(1, np.int64)))

    def __len__(self) -> int:
        """Return the number of lists."""
        return int(self._first[-1])

    def __getitem__(self, index: int) -> Array:
        """Return a list, a part of its file's values."""
        file_index = int(np.searchsorted(self._first, index, side="right")) - 1
        lists = self._file(file_index)
        place = index - int(self._first[file_index])
        return lists.values[lists.offsets[place] : lists.offsets[place + 1]]

    def lengths(self) -> Array:
        """Return the length of each list; every file is decoded."""
        found = [self._file(file_index).lengths for file_index in range(len(self._files))]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _file(self, file_index: int) -> Jagged:
        if self._open[0] != file_index:
            found = self._kept.find(self._owner, file_index)
            if found is None:
                found = self._decode(self._files[file_index])
                self._files[file_index].close()
                self._kept.keep(self._owner, file_index, found)
            self._open = file_index, found
        return self._open[1]


def _num_rows(file: CheckedFile) -> int:
    num_rows = file.num_rows
    file.close()
    return num_rows
