"""Rows of one table in files, in one part or several: of a row in several the newest holds."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.flash.manifest import ROW_FILES
from trainer.npy import NpyFile
from trainer.stores.store import ROWS_AT_ONCE, Records, TableLayout

RowsAndRecords = tuple[NDArray[np.int64], Records]


class RowPart:
    """A part, mapped; its bytes have been verified."""

    def __init__(self, folder: Path, *, random: bool = False) -> None:
        """Map the files.

        Args:
            folder: with one file of each of `ROW_FILES`.
            random: rows are asked for one by one, not in order.
        """
        self.rows, values, state = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ROW_FILES
        )
        for array in (values, state):
            if random and isinstance(array, np.memmap):  # one without numbers is not mapped
                array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined] # no other way
        self.records = Records(values, state)

    def pieces(self) -> Iterator[RowsAndRecords]:
        """Yield all rows, ascending, some at a time."""
        for start in range(0, len(self.rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            records = Records(
                np.array(self.records.values[part]), np.array(self.records.state[part])
            )
            yield np.array(self.rows[part]), records


def newest(streams: Sequence[Iterator[RowsAndRecords]]) -> Iterator[RowsAndRecords]:
    """Merge ascending streams of rows; of a row in several the one of the first stream is given.

    In memory is one piece of each stream.

    Example:
        >>> def piece(*pairs):
        ...     rows, values = (np.array(each) for each in zip(*pairs))
        ...     return rows, Records(values[:, None], values[:, None])
        >>> new = iter([piece((1, 10), (4, 40))])
        >>> old = iter([piece((1, -1), (2, 20)), piece((4, -4), (9, 90))])
        >>> [(r.tolist(), v.values[:, 0].tolist()) for r, v in newest([new, old])]
        [([1, 2], [10, 20]), ([4], [40]), ([9], [90])]
    """
    if len(streams) == 1:
        yield from streams[0]
        return
    heads = [(piece, stream) for stream in streams if (piece := _next(stream)) is not None]
    while heads:
        bound = min(int(rows[-1]) for (rows, _), _ in heads)
        taken: list[RowsAndRecords] = []
        left: list[tuple[RowsAndRecords, Iterator[RowsAndRecords]]] = []
        for (rows, records), stream in heads:
            cut = int(np.searchsorted(rows, bound, side="right"))
            taken.append((rows[:cut], _cut(records, slice(0, cut))))
            rest = (rows[cut:], _cut(records, slice(cut, None)))
            following = rest if cut < len(rows) else _next(stream)
            if following is not None:
                left.append((following, stream))
        heads = left
        # the first of equal rows is that of the first stream
        found, first = np.unique(np.concatenate([r for r, _ in taken]), return_index=True)
        values, state = [r.values for _, r in taken], [r.state for _, r in taken]
        yield found, Records(np.concatenate(values)[first], np.concatenate(state)[first])


def write_part(folder: Path, layout: TableLayout, pieces: Iterable[RowsAndRecords]) -> int:
    """Write ascending rows as a part; return how many.

    Args:
        folder: new folder.
        layout: of the table.
        pieces: rows and their records.
    """
    folder.mkdir(parents=True)
    count = 0
    with (
        NpyFile(folder / "rows.npy", (), np.int64) as rows,
        NpyFile(folder / "values.npy", (layout.dim,), layout.dtype) as values,
        NpyFile(folder / "state.npy", (layout.state_width,), layout.dtype) as state,
    ):
        for some_rows, records in pieces:
            rows.append(some_rows)
            values.append(records.values)
            state.append(records.state)
            count += len(some_rows)
    return count


def _next(stream: Iterator[RowsAndRecords]) -> RowsAndRecords | None:
    """Return the next piece that has a row."""
    return next((piece for piece in stream if len(piece[0])), None)


def _cut(records: Records, part: slice) -> Records:
    return Records(records.values[part], records.state[part])
