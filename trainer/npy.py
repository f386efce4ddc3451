"""An .npy file that is written some rows at a time: the same bytes that `numpy.save` writes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from schemas.jagged import Array


class NpyFile:
    """Appends rows; the header, which says how many, is written again at the end.

    numpy leaves room in it for more digits, so its length does not change.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Remember what rows look like; entering the context opens the file.

        Args:
            path: of the file.
            shape: of one row.
            dtype: of its numbers.
        """
        self._path = path
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._num_rows = 0
        self._header_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> NpyFile:
        """Open the file."""
        self._file = self._path.open("wb")
        self._write_header(self._file)
        self._header_bytes = self._file.tell()
        return self

    def append(self, rows: Array) -> None:
        """Write rows behind those that are there."""
        assert self._file is not None, "rows are appended inside the context"
        assert rows.shape[1:] == self._shape, "rows have the shape of the file"
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._num_rows += len(rows)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the number of rows and close."""
        assert self._file is not None, "the context was entered"
        with self._file as file:
            file.seek(0)
            self._write_header(file)
            assert file.tell() == self._header_bytes, "numpy leaves room for the number of rows"

    def _write_header(self, file: BinaryIO) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._num_rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(file, header)
